"""Names come from strangers: no command prints a control character or a mark of direction that is in one."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from click.testing import CliRunner
from google.protobuf.message import Message

import onnxfuse
from onnxfuse.cli import main
from onnxfuse.errors import printable
from onnxfuse.printing import Line, SafeConsole, cell, columns, escape
from onnxfuse.report.page import ASSETS

# Sets the clipboard, links, turns red, rings, returns, breaks the line, clears the screen, turns around, hides, and is
# markup of rich: a tag that begins here and ends in the next name, and an emoji.
HOSTILE = (
    "\x1b]52;c;QUFB\x1b\\\x1b]8;;file:///x\x07\x1b[31m\x08\r\n\x9b2J\x7f\u202e\u2066\u200e\u200b\ufeff\u061c\u2028"
    "[bold]:bomb:[link=file:///x<b>"
)
FORBIDDEN = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ue000\ud800-\udfff]"
)
INVISIBLE = "\u00a0\u00ad\u034f\u115f\u17b4\u180b\u2800\u3000\u3164\ufe0f\uffa0\U000e0100"
FILE = HOSTILE.replace("/", "")
MODEL, FUSED, CERTAIN, OTHER, NEW = (f"{FILE}{name}.onnx" for name in ("model", "fused", "certain", "other", "new"))
NODE = f"{HOSTILE}node of tanh"
TEXT = """<ir_version: 8, opset_import: ["" : 17, "local" : 1, "stranger" : 1]>
g (float[batch, 8] x, bool c) => (float[batch, 8] y, float[batch, 8] z, float[batch, 8] r)
<float epsilon = {1e-5}, float two = {2}>
{
    product = MatMul(x, w)
    biased = Add(product, b)
    active = Relu(biased)
    mean = ReduceMean<axes = [-1]>(active)
    centered = Sub(active, mean)
    squared = Pow(centered, two)
    variance = ReduceMean<axes = [1]>(squared)
    shifted = Add(variance, epsilon)
    deviation = Sqrt(shifted)
    normal = Div(centered, deviation)
    twice = local.double(normal)
    tanh = Tanh(twice)
    scaled = Mul(tanh, s)
    y = Softmax(scaled)
    z = If(c) <
        then_branch = yes () => (float[batch, 8] t) { t = Exp(y) },
        else_branch = no () => (float[batch, 8] e) { d = Abs(y)  e = Softmax(d) } >
    r = RandomNormalLike(y)
}
<domain: "local", opset_import: ["" : 17]> double (p) => (q) { q = Add(p, p) }
"""


def hostile_model() -> onnx.ModelProto:
    """Return a model in which each text that a stranger may choose is hostile."""
    model = onnx.parser.parse_model(TEXT)
    model.graph.node[0].doc_string = model.doc_string = model.graph.doc_string = "doc"
    model.producer_name, model.producer_version, model.domain = "maker", "1", "org"
    model.metadata_props.add(key="key", value="value")
    model.graph.node[0].metadata_props.add(key="key", value="value")
    for name, shape in (("w", (8, 8)), ("s", (8,)), ("b", (8,))):
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for node in model.graph.node:
        node.name = f"node of {node.output[0]}"
    for text, field, message in list(texts(model)):
        value = f"{HOSTILE}{text}"
        if isinstance(getattr(message, field), str):
            setattr(message, field, value)
        else:
            repeated = getattr(message, field)
            repeated[list(repeated).index(text)] = value
    return model


def texts(message: Message) -> Iterator[tuple[str, str, Message]]:
    """Yield all texts of a model but the words of ONNX: each with its field, and the message that has it."""
    is_word = {
        "op_type": isinstance(message, onnx.NodeProto) and message.domain != "local",
        "name": isinstance(message, onnx.AttributeProto),
    }
    for field, value in message.ListFields():
        for each in list(value) if field.is_repeated else [value]:
            if isinstance(each, Message):
                yield from texts(each)
            elif (
                isinstance(each, str) and each and not is_word.get(field.name) and (field.name, each) != ("domain", "")
            ):
                yield each, field.name, message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the hostile model, and the same fused, in files of hostile names."""
    path = tmp_path_factory.mktemp("hostile")
    model = hostile_model()
    onnx.save(model, path / MODEL)
    onnx.save(onnxfuse.optimize(model)[0], path / FUSED)
    del model.graph.node[-1], model.graph.output[-1]
    onnx.save(model, path / CERTAIN)
    model.graph.node[2].op_type = "Abs"
    onnx.save(model, path / OTHER)
    return path


COMMANDS = {
    "optimize": ["optimize", MODEL, NEW, "--all"],
    "optimize to half precision": ["optimize", MODEL, "--dry-run", "--all", "--dtype", "float16"],
    "optimize to standard operators": ["optimize", MODEL, "--dry-run", "--all", "--emit", "standard"],
    "optimize nothing": ["optimize", MODEL, "--dry-run", "--all", "--only", "attention"],
    "optimize over the source": ["optimize", MODEL, MODEL],
    "plan": ["plan", MODEL, "-o", f"{FILE}plan.json"],
    "inspect": ["inspect", MODEL, "--all"],
    "inspect fused": ["inspect", FUSED, "--all"],
    "explain": ["explain", MODEL, "--limit", "100"],
    "explain region": ["explain", MODEL, "region", "--limit", "100"],
    "explain a node": ["explain", MODEL, "--node", NODE],
    "explain a node in a function": ["explain", MODEL, "--node", f"{HOSTILE}q"],
    "explain no node": ["explain", MODEL, "--node", f"{HOSTILE}node of tanhh"],
    "unfuse": ["unfuse", FUSED, NEW],
    "verify": ["verify", MODEL, FUSED],
    "verify others": ["verify", CERTAIN, OTHER],
    "compile": ["compile", FUSED, "-o", f"{FILE}file.plans", "--arch", "sm_90"],
    "regions": ["show", "region", FUSED],
    "a region": ["show", "region", FUSED, "--node", f"{HOSTILE}y"],
    "no region": ["show", "region", FUSED, "--node", f"{HOSTILE}w"],
    "bench": ["bench", CERTAIN, "--provider", "cpu", "--runs", "2", "--chart", "bench.html", "--json", "bench.json"],
    "tune": ["tune", FUSED, "--provider", "cpu"],
    "export-triton": ["export-triton", FUSED, "repository", "--name", HOSTILE],
    "no file": ["inspect", f"{FILE}none.onnx"],
    "no command": [HOSTILE],
    "no option": ["optimize", f"--{HOSTILE}"],
    "no option of the program": [f"--{HOSTILE}"],
    "no choice": ["optimize", MODEL, NEW, "--dtype", HOSTILE],
    "no fusion": ["show", HOSTILE],
    "no shape": ["optimize", MODEL, NEW, "--shape", HOSTILE],
    "no plan": ["optimize", MODEL, NEW, "--plan", HOSTILE],
    "no report": ["optimize", MODEL, NEW, "--report", HOSTILE],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_no_control_characters(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, COMMANDS[name])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    native = capfd.readouterr()
    for printed in result.stdout, result.stderr, native.out, native.err:
        assert not FORBIDDEN.search(printed), FORBIDDEN.search(printed)


@pytest.mark.parametrize("file", ["report.html", "report.json", "bench.html"])
def test_pages_hold_no_control_characters(file: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are in a page for its own program, as JSON writes them, and as escapes for the reader."""
    monkeypatch.chdir(folder)
    command = ["optimize", MODEL, "--dry-run", "--report", file]
    if file == "bench.html":
        command = ["bench", CERTAIN, "--provider", "cpu", "--runs", "2", "--no-ops", "--chart", file]
    assert CliRunner().invoke(main, command).exit_code in (0, 3)
    page = Path(file).read_text(encoding="utf-8").replace((ASSETS / "dagre.min.js").read_text(encoding="utf-8"), "")
    assert not FORBIDDEN.search(page), FORBIDDEN.search(page)
    if file == "report.json":
        assert f"{HOSTILE}y" in {one["match"].partition(":")[2] for one in json.loads(page)["fused"]}
    else:
        assert printable(FILE, keep="\n" if file == "report.html" else "") in html.unescape(page)


def test_a_summary_for_notebooks_holds_no_control_characters() -> None:
    report = onnxfuse.optimize(hostile_model(), verify=False)[1]
    assert not FORBIDDEN.search(report._repr_html_())


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_s_program_writes_names_as_escapes() -> None:
    """What the page shows of its data goes through one function."""
    source = (ASSETS / "graph.js").read_text(encoding="utf-8")
    (function,) = re.findall(r"^const printable = .*$", source, re.MULTILINE)
    program = f"{function}\nconsole.log(JSON.stringify(printable({json.dumps(HOSTILE + chr(0xE0001) + INVISIBLE)})))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60)
    shown = json.loads(done.stdout)
    assert not FORBIDDEN.search(shown) and not {"\U000e0001", *INVISIBLE} & set(shown)
    assert shown.startswith("\\u{1b}]52;c;QUFB\\u{1b}") and shown.count("\n") == 1 and "\\u{202e}" in shown


# --- the means --------------------------------------------------------------------------------------------------------


def shown(*parts: object, width: int = 200) -> str:
    console = SafeConsole(file=io.StringIO(), width=width, emoji=False, force_terminal=True, color_system=None)
    console.print(*parts)
    return console.file.getvalue()


def test_escaped_names_print_as_they_are() -> None:
    """rich sees a tag in neither of two names that would make one together, and no emoji."""
    first, second = "[link=file:///x", "y]:bomb:[/]\\"
    for part in Line(f"[bold]'{escape(first)}'[/] and '{escape(second)}'"), f"'{escape(first)}' and '{escape(second)}'":
        assert shown(part) == f"'{first}' and '{second}'\n"
    table = columns("name")
    table.add_row(cell("[red]\x1b[31m"))
    assert "[red]\\x1b[31m" in shown(table)
    assert str(Line(escape("[a]"))) == "[a]"


def test_what_is_not_escaped_is_printable_too() -> None:
    assert shown("a\x1b]8;;x\u202e\ud800\nb") == "a\\x1b]8;;x\\u202e\\ud800\nb\n"


def test_what_nothing_is_drawn_for_is_escaped_too() -> None:
    """Python calls fillers, variation selectors and blanks printable, but names that differ in them look equal."""
    written = INVISIBLE.encode("unicode_escape").decode()
    assert shown(INVISIBLE, cell(f"a{INVISIBLE}")) == f"{written} a{written}\n"
    assert printable("\u4e2d e\u0301") == "\u4e2d e\u0301"


def test_the_program_writes_warnings_and_tracebacks_as_escapes() -> None:
    """`make_safe` changes the whole process, so that it is called in one of its own."""
    program = f"""if True:
        import logging, warnings
        from onnxfuse.cli.terminal import make_safe
        make_safe()
        logging.getLogger("onnxfuse").warning("node %s", {HOSTILE!r})
        warnings.warn("node " + {HOSTILE!r})
        raise ValueError({HOSTILE!r})
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    printed = done.stderr.decode()
    assert done.returncode == 1 and printed.count("52;c;QUFB") == 3 and "ValueError" in printed
    assert not FORBIDDEN.search(printed), FORBIDDEN.search(printed)
