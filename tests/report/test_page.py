"""Test the report as a page: its size, that it is valid, needs no network, and says what the report says."""

from __future__ import annotations

import html.parser
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exported_models import load_exported
from large_graphs import transformer_like
from onnx import numpy_helper
from test_optimize import BLOCK, parse
from test_report import EVERYTHING

from onnxfuse import Report, optimize
from onnxfuse.quantize.result import OutputError, StayingWeights, WeightsResult
from onnxfuse.report.estimated_times import COPY_RATE, LAUNCH, PRODUCT_RATES
from onnxfuse.report.page import data, write_page
from onnxfuse.report.sections import miss_groups, stayed
from onnxfuse.report.times import HEIGHT, WIDTH, NodeTime, Row, Times, rate_text, roofline

VOID = {"meta", "link", "input", "br", "path", "circle", "rect"}


class Checker(html.parser.HTMLParser):
    """Notes elements that are not closed in turn, ids that stand twice, and what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.targets: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [str(found[name]) for name in ("src", "srcset", "data") if name in found]
        if (href := found.get("href")) and tag != "use":  # the page's program makes what a <use> shows
            (self.targets if href.startswith("#") else self.loads).append(href)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(text)


def checked(page: str) -> Checker:
    """Return what the checker noted of a page that is valid and complete."""
    checker = Checker()
    checker.feed(page.replace("<wbr>", ""))  # where names may be broken
    assert (checker.wrong, checker.open) == ([], [])
    assert len(checker.ids) == len(set(checker.ids))
    assert {target[1:] for target in checker.targets} <= set(checker.ids)
    assert checker.loads == ["data:,"]
    return checker


def embedded(page: str) -> dict[str, object]:
    """Return the data that a page holds."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(text))


@pytest.fixture(scope="module")
def report() -> Report:
    """Return the report of a model in which something is fused, folded and missed."""
    return optimize(parse(EVERYTHING))[1]


def test_the_page_is_valid_and_complete(report: Report) -> None:
    page = write_page(report)
    text = " ".join(" ".join(checked(page).texts).split())
    for each in ("13 nodes became 5; 3 of them are fused, 1 one to one", "Verified", "not made by", "_attention.py:"):
        assert each in text
    assert "_____^" not in text
    conv, product, scores, context = (4 * 8 * 8) * (3 * 3 * 3), 8 * 6, (2 * 5 * 5) * 4, (2 * 5 * 4) * 5
    assert f"with {2 * (conv + product + scores + context) / 1e6:.3g} MFLOP in products and convolutions" in text


def test_what_is_quoted_cannot_end_the_page() -> None:
    model = parse(EVERYTHING)
    model.graph.node[-1].name = "</script><script>alert(1)</script><!--"
    page = write_page(optimize(model, verify=False)[1])
    checked(page)
    assert "<script>alert" not in page and "</script><!--" not in page


def test_the_page_holds_what_plans_are_made_of(report: Report) -> None:
    found = data(report)
    assert found["plan"] == {"name": "g", "digest": report.input["digest"]}
    (graph,) = found["graphs"]
    before = [row[0] for row in graph["before"]]
    for number, (fusion, node, output, *_) in enumerate(found["matches"]):
        one = report.fused[number]
        assert (one.match, one.node) == (f"{fusion}:{output}", node)
        after, replaced = graph["matches"][number]
        assert graph["after"][after][0] == node
        assert [before[each] if isinstance(each, int) else each for each in replaced] == list(one.replaces)


def test_each_node_has_a_fate(report: Report) -> None:
    (graph,) = data(report)["graphs"]
    assert graph["fates"] == {"fused": 10, "weights": 1, "merged": 0, "constant": 0, "stays": 2}
    stands = {row[0]: graph["after"][row[-1]][0] for row in graph["before"]}
    assert stands["norm"] == stands["conv"] != stands["h"] == stands["product"]
    assert stands["z"] == stands["erf"] == stands["h"] == "h/gemm_bias_activation"


def test_misses_are_grouped_by_what_differs(report: Report) -> None:
    found = miss_groups(report)
    assert sum(len(each.nodes) for each in found) == len(report.missed)
    (group,) = found
    line, carets = group.source
    assert line.strip() and set(carets.strip()) == {"^"} and len(carets) <= len(line)


def test_what_stayed_has_a_reason() -> None:
    model = parse("g (float[n,n] x) => (float[n,n] y) { y = MatMul (x, x) }")
    report = optimize(model, verify=False)[1]
    (left,) = stayed(report, report.to_dict())
    assert (left.op, left.nodes) == ("MatMul", ("y",)) and "MatMul" in left.reason


def test_standard_operators_in_place_of_fused_nodes_did_not_stay() -> None:
    report = optimize(parse(BLOCK), emit="standard", verify=False)[1]
    assert report.standard and report.standard.counts and stayed(report, report.to_dict()) == []
    (graph,) = data(report)["graphs"]
    assert graph["fates"]["fused"] == 4 and len(graph["matches"]) == 2
    checked(write_page(report))


def test_a_model_in_which_nothing_is_fused_has_a_page() -> None:
    page = write_page(optimize(parse("g (float[n] x) => (float[n] y) { y = Exp (x) }"))[1])
    assert "nothing was fused" in " ".join(checked(page).texts)


def test_quantized_weights_are_told(report: Report) -> None:
    """The page has every error, and None, which JSON has for an infinite one, is a word."""
    stays = StayingWeights("Gemm", "only weights of MatMuls are quantized", ("gate</p>",))
    errors = OutputError("y", 0.5, 0.25), OutputError("z", math.inf, math.inf)
    told = WeightsResult("int4", 32, 3, (stays,), 9_000_000, 5_000_000, errors, "a note")
    text = " ".join(checked(write_page(replace(report, weights=told))).texts)
    start = text.index("Weights that were quantized")
    found = " ".join(text[start : text.index("The run", start)].split())
    assert found.startswith("Weights that were quantized 3 products in int4, blocks of 32, 9 MB -> 5 MB output")
    assert "y 0.5 0.25 z infinite infinite a note" in found
    assert "1 Gemm only weights of MatMuls are quantized gate</p>" in found
    assert "Weights that were quantized" not in write_page(report)


def timed(report: Report, flops: int | None = 200) -> Report:
    """Return the report with times: 1 us for each node before fusing, and 2 us, 10 bytes and some FLOPs after."""
    assert report.facts
    graph = report.facts.graphs[0]
    before = tuple(NodeTime(node.label, node.op, "onnxruntime", 1e-6, 10, 0) for node in graph.before.nodes)
    after = tuple(NodeTime(node.label, node.op, "kernel", 2e-6, 10, flops) for node in graph.after.nodes)
    return replace(report, times=Times("a GPU", {"x": "2x8 float"}, before, after, 1e8))


def test_the_times_of_nodes_are_shown_before_above_after(report: Report) -> None:
    """Each node after fusing has the time of all nodes that it stands for, and strips are as wide as their sums."""
    page = write_page(timed(report))
    text = " ".join(" ".join(checked(page).texts).split())
    assert "Measure on your GPU" not in text and "Measure on your GPU" in write_page(report)
    assert "timed alone on a GPU, with x 2x8 float ;" in text and "as fast as a copy, 100 MB a second" in text
    assert "Before: 13 nodes timed, 13.0 µs After: 5 nodes timed, 10.0 µs" in text
    assert [float(each) for each in re.findall(r'class="strip".*?width:([\d.]+)%', page)] == [100, 76.92]
    found = re.findall(
        r'<tr><th scope="row"><button[^>]*data-at="(\d+)">.*?</i>([\d.]+) µs.*?</i>([\d.]+) µs', page, re.S
    )
    stands_for = Counter(row[-1] for row in data(report)["graphs"][0]["before"])
    assert {int(at): (float(before), float(after)) for at, before, after in found} == {
        at: (count, 2.0) for at, count in stands_for.items()
    }
    assert "by estimates" not in page


def test_a_page_without_times_has_estimates_and_says_so(report: Report) -> None:
    """Of all nodes that launch kernels; the work of fused nodes is that of the nodes that they stand for."""
    text = " ".join(" ".join(checked(write_page(report)).texts).split())
    assert "Where the time goes, by estimates" in text and "was timed alone" not in text
    assert "No GPU timed the nodes of the main graph: these are estimates for an NVIDIA H200, with batch = 1." in text
    times = report.estimated_times
    assert times and report.facts
    assert len(times.before) == report.before.launches and len(times.after) == report.after.launches
    assert sum(one.flops or 0 for one in times.before) == sum(one.flops or 0 for one in times.after) > 0
    (conv,) = (one for one in times.after if one.op == "conv_bias_activation")
    assert conv.bytes and conv.flops and conv.how == "estimate"
    assert conv.seconds == pytest.approx(LAUNCH + max(conv.bytes / COPY_RATE, conv.flops / PRODUCT_RATES["float"]))
    fused_before = replace(report.facts.graphs[0], before=report.facts.graphs[0].after)
    assert replace(report, facts=replace(report.facts, graphs=(fused_before,))).estimated_times is None


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("float", "MatMul"), ("float16", "MatMul"), ("int8", "MatMulInteger"), ("double", "MatMul"), ("float", "Relu")],
)
def test_an_estimate_takes_the_rate_of_its_dtype(dtype: str, op: str) -> None:
    """A product alone, and one that is fused with a Relu, of square matrices of 2048."""
    size, out = 2048, "int32" if dtype == "int8" else dtype
    body = f"y = {op} (x, w)" if op != "Relu" else "h = MatMul (x, w) y = Relu (h)"
    text = f"g ({dtype}[{size},{size}] x, {dtype}[{size},{size}] w) => ({out}[{size},{size}] y) {{ {body} }}"
    model = parse(text)
    if op == "Relu":
        weight = numpy_helper.from_array(np.ones((size, size), np.float32), "w")
        model.graph.initializer.append(weight)
        del model.graph.input[1]
    times = optimize(model, verify=False)[1].estimated_times
    assert times and times.product_rates == {dtype: PRODUCT_RATES[dtype]}
    (node,) = times.after
    assert node.flops == 2 * size**3 and node.seconds == pytest.approx(LAUNCH + node.flops / PRODUCT_RATES[dtype])


def test_a_roofline_has_the_nodes_with_flops_and_the_lines_of_a_copy_and_of_products(report: Report) -> None:
    """Nodes of 200 FLOPs and 10 bytes in 2 us are at 20 FLOPs per byte and 100 MFLOP/s; the copy has 100 MB/s."""
    times = Times("a GPU", {}, (), (), 1e8)
    rows = [
        Row(i, f"n{i}", NodeTime(f"n{i}", "Conv", "kernel", 2e-6, 10, flops), 0.0) for i, flops in enumerate((200, 0))
    ]
    drawn = roofline([*rows, Row(2, "n2", None, 1.0)], times)
    assert drawn and [dot.row.node for dot in drawn.dots] == [0]
    (dot,) = drawn.dots
    assert [label for _, label in drawn.x_ticks] == ["10", "100"]
    assert [label for _, label in drawn.y_ticks] == ["100 MFLOP/s", "1 GFLOP/s", "10 GFLOP/s"]
    assert [rate_text(rate) for rate in (2.5e10, 3.0, 9.89e14)] == ["25 GFLOP/s", "3 FLOP/s", "989 TFLOP/s"]
    assert dot.x == pytest.approx(WIDTH * math.log10(2), abs=0.1) and dot.y == HEIGHT
    (left, low), (right, high) = drawn.roof or ((0, 0), (0, 0))
    assert (left, low) == (0, HEIGHT / 2) and (right, high) == (WIDTH, 0)
    assert roofline(rows[1:], times) is None
    drawn = roofline(rows, replace(times, product_rates={"float16": 1e9, "float": 1e8}))
    middle = WIDTH / 2  # 10 FLOPs per byte
    assert drawn and drawn.roof == ((0, HEIGHT), (middle, 0))
    assert drawn.levels == {"float16": ((middle, 0), (WIDTH, 0)), "float": ((0, HEIGHT), (WIDTH, HEIGHT))}
    page = write_page(timed(report, None))
    assert "Where the time goes" in page and "Roofline" not in page


def test_a_body_is_drawn_too() -> None:
    model = parse("""
        g (bool c, float[2,8] x) => (float[2,6] y) <float[8,6] w, float[6] b>
        { y = If (c) <then_branch = t () => (float[2,6] p) { m = MatMul (x, w) a = Add (m, b) p = Relu (a) },
                      else_branch = f () => (float[2,6] q) { q = MatMul (x, w) }> }""")
    report = optimize(model)[1]
    found = data(report)
    assert [graph["where"] for graph in found["graphs"]][1:] == [
        "the then branch of If 'y'", "the else branch of If 'y'"
    ]  # fmt: skip
    assert "the then branch" in write_page(report)


def test_a_report_without_facts_is_a_page_too(report: Report) -> None:
    assert "conv_bias_activation" in write_page(replace(report, facts=None))


def test_the_summary_for_notebooks(report: Report) -> None:
    summary = report._repr_html_()
    assert len(summary) < 5000 and "<script" not in summary
    assert "gemm_bias_activation" in summary and "Verified" in summary


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    optimize(parse(EVERYTHING))
    assert capsys.readouterr() == ("", "")


def test_the_page_of_an_exported_model(tmp_path: Path) -> None:
    optimize(load_exported("llama_sdpa_ts_fp32.onnx"), verify=False)[1].write(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    checked(page)
    assert len(embedded(page)["matches"]) > 10  # type: ignore[arg-type]


def test_ten_thousand_nodes_are_less_than_two_megabytes() -> None:
    model = transformer_like(500, tuple(range(9, 203, 2)))
    assert len(model.graph.node) == 10_000
    page = write_page(optimize(model, verify=False, only=["gemm_bias_activation", "layer_norm"])[1])
    assert len(page.encode()) < 2e6
    # Identities are not launched, and neighbours that are too narrow are drawn as one.
    assert "Before: 9,500 nodes, " in page and 500 < page.count("<i data-jump") < 3000
    checked(page)
