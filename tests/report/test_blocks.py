"""Test that blocks which repeat are found, with the nodes of one copy in the order that the data takes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from exported_models import load_exported
from large_graphs import transformer_like

from onnxfuse import optimize
from onnxfuse.report.blocks import MAX_ITEMS, Block, Blocks, Item, find_blocks, reading_order
from onnxfuse.report.picture import Table, picture

LAYER = ("qkv", "attention", "proj", "norm", "up", "down", "norm")


def transformer(layers: int) -> tuple[list[str], list[list[int]]]:
    """Return labels and reads of a mask of two nodes, an embedding, equal layers, and a head."""
    labels, reads = ["cast", "unsqueeze", "embedding"], [[], [0], list[int]()]
    stream = 2
    for _ in range(layers):
        at = len(labels)
        labels += LAYER
        reads += [[stream], [at, 1], [at + 1, stream], [at + 2], [at + 3], [at + 4, at + 3], [at + 5]]
        stream = at + 6
    return [*labels, "head"], [*reads, [stream]]


def named(found: Blocks, labels: list[str], items: tuple[Item, ...] | None = None) -> list[object]:
    """Return the labels of nodes, and (copies, labels) of blocks."""
    return [
        (item.copies, *named(found, labels, item.items)) if isinstance(item, Block) else labels[found.order[item]]
        for item in (found.items if items is None else items)
    ]


def test_twelve_equal_layers_are_one_block() -> None:
    labels, reads = transformer(12)
    found = find_blocks(labels, reads)
    assert named(found, labels) == ["cast", "unsqueeze", "embedding", (12, *LAYER), "head"]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_file_does_not_matter(seed: int) -> None:
    labels, reads = transformer(6)
    order = list(range(len(labels)))
    random.Random(seed).shuffle(order)
    new = {old: i for i, old in enumerate(order)}
    shuffled = [labels[old] for old in order]
    found = find_blocks(shuffled, [[new[each] for each in reads[old]] for old in order])
    assert named(found, shuffled)[-2:] == [(6, *LAYER), "head"]


def test_a_layer_that_differs_stands_apart() -> None:
    labels, reads = transformer(7)
    labels[3 + 3 * len(LAYER) + 4] = "wider"
    found = find_blocks(labels, reads)
    shown = named(found, labels)
    assert [each[0] for each in shown if isinstance(each, tuple)] == [3, 3] and "wider" in shown
    assert shown[:4] == ["cast", "unsqueeze", "embedding", (3, *LAYER)]


def test_copies_that_are_linked_differently_inside_are_no_block() -> None:
    """The second of each pair reads the first in one copy, and what is before it in the other."""
    labels = ["input", *("a", "b", "c", "d") * 2]
    reads: list[list[int]] = [[], [0], [1], [2], [3], [4], [4], [6], [7]]
    assert named(find_blocks(labels, reads), labels) != ["input", (2, "a", "b", "c", "d")]


def test_blocks_inside_blocks() -> None:
    inner = ("conv", "norm") * 4
    labels = ["stem", *(*inner, "pool") * 3]
    reads = [[], *([i] for i in range(len(labels) - 1))]
    assert named(find_blocks(labels, reads), labels) == ["stem", (3, (4, "conv", "norm"), "pool")]


def test_many_nodes_without_a_block_stand_in_sections() -> None:
    count = 3000
    labels = [f"op{i}" for i in range(count)]
    found = find_blocks(labels, [[], *([i] for i in range(count - 1))])

    def check(items: tuple[Item, ...]) -> list[int]:
        assert len(items) <= MAX_ITEMS
        return [each for item in items for each in (check(item.items) if isinstance(item, Block) else [item])]

    assert check(found.items) == list(range(count))


def test_the_reading_order_follows_long_chains() -> None:
    """A chain of more nodes than Python's calls may be nested."""
    count = 20_000
    reads = [[i + 1] for i in range(count - 1)] + [[]]
    assert reading_order(reads, ()) == list(range(count))[::-1]


@pytest.mark.parametrize(
    ("name", "copies", "length"), [("bert_eager_ts_fp32.onnx", 2, 7), ("resnet50_dynamo_fp32.onnx", 5, 3)]
)
def test_blocks_of_exported_models(name: str, copies: int, length: int) -> None:
    report = optimize(load_exported(name), verify=False)[1]
    assert report.facts
    (graph,) = report.facts.graphs

    def found(items: list[Any]) -> list[list[int]]:
        return [each for item in items if isinstance(item, list) for each in (item[:2], *found(item[2]))]

    assert [copies, length] in found(picture(graph, report.fused, report.folded, Table())["items"])


def test_many_nodes_stand_in_the_scopes_of_their_names() -> None:
    """Each stage is a block, in which each part of many nodes is one; the stem, which is short, stays as it is."""
    sizes = {("net",): 2, ("net", "stage.0", "conv"): 10, ("net", "stage.0", "mlp"): 30, ("net", "stage.1"): 9}
    scopes = [scope for scope, count in sizes.items() for _ in range(count)]
    labels = [f"op{i}" for i in range(len(scopes))]
    found = find_blocks(labels, [[], *([i] for i in range(len(labels) - 1))], scopes)
    stem, other, first, second = found.items
    assert (stem, other) == (0, 1) and isinstance(first, Block) and isinstance(second, Block)
    assert [(each.scope, each.copies, each.length) for each in (first, second)] == [
        (("net", "stage.0"), 1, 40), (("net", "stage.1"), 1, 9)
    ]  # fmt: skip
    parts = [each for each in first.items if isinstance(each, Block)]
    assert [each.scope[2] for each in parts] == ["conv", "mlp"] and second.items == tuple(range(42, 51))


def test_a_repeated_block_has_the_scope_of_its_first_copy() -> None:
    labels, reads = transformer(4)
    scopes = [("embed",)] * 3 + [("layers", str(i // len(LAYER))) for i in range(4 * len(LAYER))] + [()]
    (block,) = (item for item in find_blocks(labels, reads, scopes).items if isinstance(item, Block))
    assert (block.copies, block.scope) == (4, ("layers", "0"))


@pytest.mark.parametrize("by_dynamo", [False, True])
def test_a_fused_node_has_the_scope_of_the_nodes_that_it_replaces(by_dynamo: bool) -> None:
    """Exports of torch by dynamo have the modules in metadata, and not in the names."""
    model = transformer_like(30, tuple(range(9, 39)))
    for i, node in enumerate(model.graph.node if by_dynamo else ()):
        module, node.name = node.name.split("/")[2], f"node_{i}"
        node.metadata_props.add(
            key="pkg.torch.onnx.name_scopes",
            value=f"['', 'encoder', 'encoder.{module}', 'encoder.{module}.mlp', '{node.name}']",
        )
    report = optimize(model, verify=False)[1]
    assert report.facts
    (graph,) = report.facts.graphs
    found = picture(graph, report.fused, report.folded, Table())["items"]
    layers = [part for item in found for part in (item[2] if item[1] > 3 else [item])]
    expected = "encoder/layer.{}/mlp" if by_dynamo else "/encoder/layer.{}"
    assert [part[3] for part in layers] == [expected.format(i) for i in range(30)]
