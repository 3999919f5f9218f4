"""Files of strangers: models with fields that no exporter writes, given to the command line.

It must end with one line and the exit code 1 (2 if an option does not fit the model), or with a file that computes the
same.  It must not end in a traceback,
take more than MAX_BYTES, or print a control character.
"""

from __future__ import annotations

import resource
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

import onnx
from click.testing import CliRunner, Result
from judge import SECONDS, Hang, Inputs, Options, Verdict, compare_on, limited
from onnx import AttributeProto, TensorProto, helper

from onnxfuse.cli import main
from onnxfuse.ir.protos import nodes
from onnxfuse.verify import own_process

MAX_BYTES = 2 * 2**30  # that one command may take
MAX_CHANGES = 3
WRITTEN = (0, 3, 4)  # exit codes with which a file is written
REFUSED = (1, 2)  # exit codes with which none is
NAMES = ["\x1b]52;c;aGk=\x07", "\x1b[2J\x1b[H", "a\nError: b", "\u202egnp", "\x9b31m", "", " ", "x" * 100_000,
         "[red]x[/]", "../../up", "C:\\con", "a\0b", "onnxfuse", "%s%n{0}", "::"]  # fmt: skip
Change = Callable[[Random, onnx.ModelProto], None]


def make_hostile(random: Random, model: onnx.ModelProto) -> onnx.ModelProto:
    """Change a few fields of a model to what they should not be."""
    for _ in range(random.randint(1, MAX_CHANGES)):
        random.choice(CHANGES)(random, model)
    return model


def hostile_verdict(model: onnx.ModelProto | bytes, sizes: Mapping[str, int], seed: int, options: Options) -> Verdict:
    """Give the model to a command, and judge how that ends; a file that is written must compute the same."""
    assert isinstance(model, onnx.ModelProto)
    random = Random(f"command {seed}")  # the seed alone has drawn the case
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "out.onnx")
        source.write_bytes(model.SerializeToString())
        command = random.choices(["optimize", "inspect", "explain", "unfuse"], [6, 2, 1, 1])[0]
        arguments = {"optimize": [str(target), *_flags(options)], "unfuse": [str(target)],
                     "explain": ["layer_norm"]}.get(command, [])  # fmt: skip
        if command == "optimize" and random.random() < 0.3:
            arguments += ["--report", str(Path(folder, random.choice(["report.json", "report.html"])))]
        try:
            with limited(SECONDS), little_memory(), patch.object(own_process, "enabled", False):  # it is one already
                result = CliRunner().invoke(main, [command, str(source), *arguments])
        except Hang as error:
            return Verdict("hang", f"{command}: {error}")
        verdict = _of_result(command, result, written=target.exists())
        if verdict or command != "optimize" or result.exit_code not in WRITTEN:
            return verdict or Verdict("idle", "it ended with one line")
        optimized = onnx.load(target)
    if any(t.data_location == TensorProto.EXTERNAL for t in model.graph.initializer):
        return Verdict("idle", "its data is in another file")
    return compare_on(model, optimized, Inputs(sizes, seed), options)


def _of_result(command: str, result: Result, written: bool) -> Verdict | None:
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]} in {last.name}"
        return Verdict("traceback", f"{command}: {type(error).__name__} {where}: {' '.join(str(error).split())[:200]}")
    odd = [c for c in result.output if not c.isprintable() and c != "\n"]
    if odd:
        return Verdict("traceback", f"{command}: it prints the control character {odd[0]!r}")
    said = [line for line in result.stderr.splitlines() if line.strip()]
    if result.exit_code in REFUSED and (len(said) != 1 or not said[0].startswith("error: ")):
        return Verdict("traceback", f"{command}: it ends with {len(said)} lines: {' | '.join(said)[:200]}")
    if command == "optimize" and result.exit_code in WRITTEN and not written:
        return Verdict("traceback", f"{command}: it ends with {result.exit_code} and writes no file")
    if result.exit_code not in (*WRITTEN, *REFUSED):
        return Verdict("traceback", f"{command}: it ends with {result.exit_code}: {' | '.join(said)[:200]}")
    return None


def _flags(options: Options) -> list[str]:
    found = [] if options.verify else ["--no-verify"]
    found += [] if options.regions else ["--no-regions"]
    for name, usual in (("dtype", None), ("emit", "functions"), ("layout", "auto"), ("fallback", "onnx")):
        value = getattr(options, name)
        found += [] if value == usual else [f"--{name}", value]
    return found


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take MAX_BYTES more than it has, and no more."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data and stack
    most = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(
        resource.RLIMIT_DATA, (most if before[1] == resource.RLIM_INFINITY else min(most, before[1]), before[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


# --- changes ---------------------------------------------------------------------------------------------------------


def _some_node(random: Random, model: onnx.ModelProto) -> onnx.NodeProto:
    if not model.graph.node:
        model.graph.node.append(helper.make_node("Identity", ["x"], ["y"]))
    return random.choice(list(model.graph.node))


def _some_tensor(random: Random, model: onnx.ModelProto) -> TensorProto:
    held = [*model.graph.initializer, *(a.t for n in nodes(model.graph) for a in n.attribute if a.HasField("t"))]
    if not held:
        held = [model.graph.initializer.add(name="added", data_type=TensorProto.FLOAT, dims=[1], raw_data=b"\0" * 4)]
    return random.choice(held)


def odd_name(random: Random, model: onnx.ModelProto) -> None:
    """Rename a node, a value everywhere, an operator, a domain, a dim or the graph, or change what documents it."""
    name, graph = random.choice(NAMES), model.graph
    way, node = random.randrange(8), _some_node(random, model)
    if way == 0:
        node.name = name
    elif way == 1:
        old = random.choice([n for each in graph.node for n in (*each.input, *each.output)] or ["x"])
        for each in nodes(graph):
            each.input[:] = [name if n == old else n for n in each.input]
            each.output[:] = [name if n == old else n for n in each.output]
        for info in (*graph.input, *graph.output, *graph.initializer):
            info.name = name if info.name == old else info.name
    elif way == 2:
        graph.name = model.producer_name = name
    elif way == 3:
        node.op_type = name
    elif way == 4:
        node.domain = name
    elif way == 5:
        model.doc_string = graph.doc_string = node.doc_string = name
        model.metadata_props.extend([onnx.StringStringEntryProto(key=name, value=name)] * 2)
    elif way == 6:
        model.opset_import.append(helper.make_opsetid(name, 1))
    else:
        for info in graph.input:
            for dim in info.type.tensor_type.shape.dim:
                dim.dim_param = name


def wrong_tensor(random: Random, model: onnx.ModelProto) -> None:
    """Give a tensor data of another size, other dims or another dtype."""
    tensor, way = _some_tensor(random, model), random.randrange(6)
    if way == 0:
        tensor.raw_data = tensor.raw_data[: random.randint(0, 3)]
    elif way == 1:
        tensor.raw_data += b"\0" * random.randint(1, 9)
    elif way == 2:
        tensor.dims[:] = random.choice([[-1], [2**40], [2**31, 2**31, 4], [0, 2**62], [1] * 200, [3, -2]])
    elif way == 3:
        tensor.data_type = random.choice([0, 8, 14, 17, 22, 23, 99, -1])
    elif way == 4:
        tensor.float_data.extend([1.0] * 3)
    else:
        tensor.ClearField("raw_data")


def external_tensor(random: Random, model: onnx.ModelProto) -> None:
    """Say that a tensor's data lies in a file, which is not there or may not be read."""
    tensor = _some_tensor(random, model)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": random.choice(["missing.bin", "/etc/passwd", "../../../etc/passwd", "model.onnx", "",
                                          "/dev/zero", ".", "a\nb", "x" * 5000]),
               "offset": random.choice(["0", "-1", "x", str(2**62)]),
               "length": random.choice(["4", "-4", "", str(2**62)])}  # fmt: skip
    for key in random.sample(list(entries), random.randint(0, 3)):
        tensor.external_data.add(key=key, value=entries[key])


def cycle(random: Random, model: onnx.ModelProto) -> None:
    """Let a node read its own result, or that of a later one."""
    node = _some_node(random, model)
    later = random.choice([node, model.graph.node[-1]])
    if node.input and later.output:
        node.input[random.randrange(len(node.input))] = later.output[0]


def twice(random: Random, model: onnx.ModelProto) -> None:
    """Write something twice: a node, an output, an input, an initializer, an opset or a function."""
    graph = model.graph
    part = random.choice(
        [graph.node, graph.output, graph.input, graph.initializer, model.opset_import, model.functions]
    )
    if part:
        part.append(random.choice(list(part)))


def wrong_versions(random: Random, model: onnx.ModelProto) -> None:
    """Give the model another IR version, or other opsets."""
    version = random.choice([0, -1, 1, 6, 25, 27, 999, 2**31, 2**62])
    if random.random() < 0.4:
        model.ir_version = version
    elif random.random() < 0.6 and model.opset_import:
        model.opset_import[0].version = version
    else:
        del model.opset_import[:]


def wrong_types(random: Random, model: onnx.ModelProto) -> None:
    """Declare an input or an output as something else."""
    infos = [*model.graph.input, *model.graph.output]
    info = random.choice(infos) if infos else model.graph.input.add(name="x")
    way = random.randrange(5)
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    if way == 0:
        info.ClearField("type")
    elif way == 1:
        info.type.tensor_type.elem_type = random.choice([0, 8, 14, 20, 99])
    elif way == 2:
        info.type.CopyFrom(
            random.choice([helper.make_sequence_type_proto(tensor), helper.make_optional_type_proto(tensor)])
        )
    elif way == 3:
        dims = [random.choice([-1, -5, 2**40, "", None]) for _ in range(random.randint(1, 3))]
        info.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, dims))
    else:
        info.type.map_type.key_type = 7
        info.type.map_type.value_type.CopyFrom(tensor)


def wrong_attribute(random: Random, model: onnx.ModelProto) -> None:
    """Give a node an attribute of another type, without a value, or that refers to one of a function."""
    node = _some_node(random, model)
    name = random.choice([*(a.name for a in node.attribute), "axis", "perm", "to", "value", "axes", "body", "epsilon"])
    kept = [a for a in node.attribute if a.name != name or random.random() < 0.3]
    way = random.randrange(4)
    if way == 0:
        new = AttributeProto(name=name, ref_attr_name="outside", type=random.choice([0, 1, 2, 7]))
    elif way == 1:
        graph = helper.make_graph([], "", [], [])
        value = random.choice(
            [1, -(2**63), 1.5, float("nan"), "text", b"\xff", [1, 2], [2**63 - 1], [0.5], ["a"], graph]
        )
        new = helper.make_attribute(name, value)
    elif way == 2:
        new = AttributeProto(name=name, type=random.choice([0, 4, 5, 9, 77 % 15]))
    else:
        new = AttributeProto(name="", type=AttributeProto.INT, i=1)
    del node.attribute[:]
    node.attribute.extend([*kept, new])


def wrong_inputs(random: Random, model: onnx.ModelProto) -> None:
    """Leave out inputs or outputs of a node, or add some, or name values that nothing makes."""
    node = _some_node(random, model)
    part = random.choice([node.input, node.output])
    way = random.randrange(4)
    if way == 0:
        del part[:]
    elif way == 1:
        part.extend(["", "nowhere", *(node.input[:1])])
    elif way == 2 and part:
        part[random.randrange(len(part))] = random.choice(["", "nowhere"])
    else:
        part.extend(["more"] * 300)


def odd_functions(random: Random, model: onnx.ModelProto) -> None:
    """Add functions that call themselves, or the one before twice, or that have names of onnxfuse or of ONNX."""
    opsets = [*model.opset_import, helper.make_opsetid("f", 1)]
    way = random.randrange(4)
    if way == 0:
        call = helper.make_node("g", ["x"], ["y"], domain="f")
        model.functions.append(helper.make_function("f", "g", ["x"], ["y"], [call], opsets))
    elif way == 1:
        model.functions.append(
            helper.make_function("f", "g", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], opsets)
        )
        for depth in range(60):
            name = f"g{depth}" if depth < 59 else "top"
            before = "g" if depth == 0 else f"g{depth - 1}"
            calls = [
                helper.make_node(before, ["x"], ["a"], domain="f"),
                helper.make_node(before, ["a"], ["y"], domain="f"),
            ]
            model.functions.append(helper.make_function("f", name, ["x"], ["y"], calls, opsets))
    else:
        domain, name = random.choice([("onnxfuse", "g"), ("", "Relu"), ("onnxfuse", "layer_norm"), ("ai.onnx", "g")])
        body = [helper.make_node("Neg", ["x"], ["y"])]
        model.functions.append(helper.make_function(domain, name, ["x"], ["y"], body, opsets))
    last = model.functions[-1]
    model.opset_import.append(helper.make_opsetid(last.domain, 1))
    if model.graph.input:
        made = helper.make_node(last.name, [model.graph.input[0].name], ["called"], domain=last.domain)
        model.graph.node.append(made)
        model.graph.output.append(onnx.ValueInfoProto(name="called"))


def huge_results(random: Random, model: onnx.ModelProto) -> None:
    """Add constants that would be huge if they were folded, or a sparse initializer of a huge shape."""
    graph = model.graph
    way = random.randrange(3)
    if way == 0:
        sparse = graph.sparse_initializer.add(dims=[2**40])
        sparse.values.CopyFrom(helper.make_tensor("sparse", TensorProto.FLOAT, [1], [1.0]))
        sparse.indices.CopyFrom(helper.make_tensor("at", TensorProto.INT64, [1], [5]))
        return
    size = random.choice([2**31, 2**36, 2**62])
    graph.initializer.append(helper.make_tensor("huge_size", TensorProto.INT64, [1], [size]))
    if way == 1:
        graph.node.append(helper.make_node("ConstantOfShape", ["huge_size"], ["huge"]))
    else:
        graph.initializer.append(helper.make_tensor("one_number", TensorProto.FLOAT, [1], [1.0]))
        graph.node.append(helper.make_node(random.choice(["Expand", "Tile"]), ["one_number", "huge_size"], ["huge"]))
    graph.node.append(helper.make_node("Neg", ["huge"], ["less"]))
    graph.output.append(helper.make_tensor_value_info("less", TensorProto.FLOAT, None))


def nothing(random: Random, model: onnx.ModelProto) -> None:
    """Leave out all nodes, inputs, outputs or initializers, or the graph."""
    field = random.choice(["node", "input", "output", "initializer", ""])
    if field:
        model.graph.ClearField(field)
    else:
        model.ClearField("graph")


def deep(random: Random, model: onnx.ModelProto) -> None:
    """Add Ifs inside Ifs; protobuf reads few more."""
    body = helper.make_graph([helper.make_node("Identity", ["deep_flag"], ["deep_end"])], "g", [],
                             [helper.make_tensor_value_info("deep_end", TensorProto.BOOL, [])])  # fmt: skip
    end = body
    for _ in range(random.choice([5, 15, 28])):
        node = helper.make_node("If", ["deep_flag"], ["deep_end"], then_branch=body, else_branch=end)
        body = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("deep_end", TensorProto.BOOL, [])])
    model.graph.initializer.append(helper.make_tensor("deep_flag", TensorProto.BOOL, [], [True]))
    model.graph.node.extend(body.node)
    model.graph.output.append(helper.make_tensor_value_info("deep_end", TensorProto.BOOL, []))


CHANGES: list[Change] = [odd_name, odd_name, wrong_tensor, external_tensor, cycle, twice, wrong_versions, wrong_types,
                         wrong_attribute, wrong_inputs, odd_functions, huge_results, nothing, deep]  # fmt: skip
