"""Names of a graph as what follows from earlier names: exporters count values, and name nodes after their outputs.

A name that is written short holds characters that names of exported models do not hold.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto

OPERATOR, OUTPUT, NUMBER = "\1\2\3"  # in a node's name: its operator, its first output, and the number that ends that


@dataclass
class Table:
    """The values or the weights of a graph by number.  A short reference is one character: a distance in the table."""

    first: int  # the character of no distance
    names: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    before: int = 0  # what distances are counted from: the number of the latest reference

    def add(self, name: str) -> None:
        """Give a name the next number."""
        self.numbers[name] = len(self.names)
        self.names.append(name)

    def short(self, name: str) -> str:
        """Return a short reference to a name that is in the table."""
        before, self.before = self.before, self.numbers[name]
        return chr(self.first + self.before - before)

    def full(self, short: str) -> str:
        """Return the name that a short reference stands for."""
        self.before += ord(short) - self.first
        return self.names[self.before]

    def holds(self, short: str) -> bool:
        """Return whether this is a short reference to a name of this table."""
        return len(short) == 1 and abs(ord(short) - self.first) <= 0x1000


@dataclass
class Names:
    """The names of a graph as far as it is read, which both directions must know alike."""

    values: Table = field(default_factory=lambda: Table(0x2000))
    weights: Table = field(default_factory=lambda: Table(0x5000))
    latest: Counter[str] = field(default_factory=Counter)  # the number of the newest output whose name begins so

    def reference(self, name: str, short: bool) -> str:
        """Return the short form of a reference, or the name that one stands for; another name is returned as it is."""
        for table in self.values, self.weights:
            if table.holds(name) and not short:
                return table.full(name)
            if name in table.numbers and short:
                return table.short(name)
        return name

    def output(self, name: str, short: bool) -> tuple[str, str]:
        """Return the form of an output that is wanted, and its name.  A short form ends in a small difference."""
        begin, number = parted(name)
        if short and number is not None and 0 <= (step := number - self.latest[begin]) < ord(" "):
            found = begin + chr(step), name
        elif not short and name and name[-1] < " ":
            begin, number = name[:-1], self.latest[name[:-1]] + ord(name[-1])
            found = (f"{begin}{number}",) * 2
        else:
            found = name, name
        if number is not None:
            self.latest[begin] = number
        self.values.add(found[1])
        return found


def parted(name: str) -> tuple[str, int | None]:
    """Return a name without the decimal number at its end, and the number if there is one."""
    found = re.fullmatch(r"(.*?)(0|[1-9][0-9]*)", name, re.DOTALL)
    return (found[1], int(found[2])) if found else (name, None)


def rename(graph: GraphProto, short: bool) -> None:
    """Write the names of a graph and of graphs inside it short, or write those in full again."""
    names = Names()
    for each in graph.input:
        names.values.add(each.name)
    for each in graph.initializer:
        names.weights.add(each.name)
    for node in graph.node:
        names.values.before = len(names.values.names)
        node.input[:] = [names.reference(each, short) for each in node.input]
        written, full = zip(*(names.output(each, short) for each in node.output), strict=True)
        node.output[:] = written
        if node.name:
            node.name = node_name(node, full[0], short)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                rename(attribute.g, short)
    for each in graph.value_info:
        each.name = names.reference(each.name, short)


def node_name(node: NodeProto, output: str, short: bool) -> str:
    """Return the name of a node with a first output of this name, short or in full."""
    parts = [(OUTPUT, output), (OPERATOR, node.op_type)]
    if (number := parted(output)[1]) is not None:
        parts.append((NUMBER, str(number)))
    name = node.name
    for character, text in parts:
        name = name.replace(text, character) if short and text else name.replace(character, text)
    return name
