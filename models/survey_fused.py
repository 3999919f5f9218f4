"""Count what is fused of a model, and lay out the results of a survey."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx

import onnxfuse
from onnxfuse.ir.domain import DOMAIN

STRUCTURES = ("attention", "rotary", "norms", "activations", "biased products")
OTHER_KIND = "attention of another kind"  # which a kernel of attention does not compute, as onnxfuse says
BIASES = {"gemm_bias_activation": ("bias",), "gated_gemm": ("bias", "up_bias"),
          "parallel_gemm": ("bias", "bias_2", "bias_3")}  # fmt: skip
FAMILIES = {
    "attention": re.compile("attention"), "rotary": re.compile("rotary_embedding"), "norms": re.compile("norm"),
    "activations": re.compile("activation"), "biased products": re.compile("gemm"),
}  # fmt: skip
ACTIVATIONS = frozenset(
    {"Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Sigmoid", "Tanh"}
)
NAME = re.compile("'[^']*'")
MAX_REASONS = 3  # of each structure of an export


def measure(path: Path, expected: Mapping[str, int], verify: bool) -> dict:
    """Return what optimizing an export fuses of each structure, and why not the rest."""
    model, report = onnxfuse.optimize(path, verify=verify)
    found = fused_structures(model)
    rows = {}
    for structure in STRUCTURES:
        row: dict = {"count": expected[structure], "fused": min(found[structure], expected[structure])}
        if row["fused"] < row["count"]:
            row["why"] = reasons(report, structure)
        rows[structure] = row
    of_other_kind = {miss.reason for miss in report.missed if "an attention kernel" in miss.reason}
    if count := min(len(of_other_kind), rows["attention"]["count"] - rows["attention"]["fused"]):
        rows[OTHER_KIND] = {"count": count, "fused": 0, "why": [NAME.sub("…", each) for each in sorted(of_other_kind)]}
        rows["attention"]["count"] -= count
    status = {True: "verified", False: "differs", None: "not verified"}[report.verified.passed] if verify else None
    dropped = sorted({f"{each.fusion}: {each.reason}" for each in report.dropped})
    return {"structures": rows, "verified": status, "dropped": dropped, "nodes": report.input["nodes"],
            "optimized": report.output["nodes"]}  # fmt: skip


def fused_structures(model: onnx.ModelProto) -> Counter[str]:
    """Return how many of each structure are in the fused nodes of a model."""
    counts: Counter[str] = Counter()
    for node in (each for each in model.graph.node if each.domain == DOMAIN):
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        fusion = attributes["fusion"].decode()
        with_rotary = fusion == "attention_with_rotary_embedding"
        counts["attention"] += fusion.startswith("attention")
        counts["rotary"] += (fusion == "rotary_embedding") + 2 * with_rotary
        counts["norms"] += fusion.endswith("_norm") + 2 * (with_rotary and attributes.get("norm") == b"rms")
        labels = [attributes[name] for name in ("activation", "activation_2") if name in attributes]
        counts["activations"] += sum(label != b"none" for label in labels)
        operands = set(attributes["operands"].decode().split())
        counts["biased products"] += len(operands.intersection(BIASES.get(fusion, ())))
        counts += in_program(json.loads(attributes.get("program", b'{"ops": []}')))
    return counts


def in_program(program: dict) -> Counter[str]:
    """Return how many norms and activations are in the program of a region, or of what follows a product.

    A Max and a Min are one activation, such as a ReLU6 or a hard sigmoid.
    """
    operators = Counter(operator for operator, *_ in program["ops"])
    activations = sum(operators[name] for name in ACTIVATIONS) + min(operators["Max"], operators["Min"])
    norms = min(operators["ReduceMean"], operators["Sqrt"]) + operators["ReduceL2"]
    return Counter(norms=norms, activations=activations)


def reasons(report: onnxfuse.Report, structure: str) -> list[str]:
    """Return the most frequent reasons of near misses of a structure, without the names of tensors."""
    found: Counter[str] = Counter()
    for miss in report.missed:
        if FAMILIES[structure].search(miss.fusion.name):
            found[f"{miss.fusion.name}: {NAME.sub('…', miss.reason)}"] += 1
    return [reason for reason, _ in found.most_common(MAX_REASONS)]


def stored(entry: dict) -> dict:
    """Return an entry as the file of results has it: fused of counted of each structure.  The page has the reasons."""
    kept = {"architecture": entry["architecture"], "exporter": way(entry)}
    kept |= {"verified": f"{way(entry)} {entry['verified']}"} if entry.get("verified") else {}
    kept |= {"error": entry["error"]} if "error" in entry else {}
    rows = entry.get("structures", {})
    return kept | {name: f"{row['fused']}/{row['count']}" for name, row in rows.items() if row["count"]}


def merged(entries: Iterable[dict]) -> list[dict]:
    """Return stored entries with those of an architecture that are equal in one, which names all exporters."""
    found: dict[tuple, dict] = {}
    for entry in entries:
        key = tuple((name, value) for name, value in sorted(entry.items()) if name not in ("exporter", "verified"))
        known = found.setdefault(key, entry)
        if known is not entry:
            verified = [each["verified"] for each in (known, entry) if "verified" in each]
            found[key] = {**known, "exporter": f"{known['exporter']}, {entry['exporter']}"}
            found[key] |= {"verified": ", ".join(verified)} if verified else {}
    return list(found.values())


def way(entry: Mapping) -> str:
    """Return how an export was made."""
    eager = " eager" if entry["attention"] == "eager" else ""
    return f"{entry['exporter']}{eager}"


def told(entry: dict) -> str:
    """Return an entry in one line."""
    head = f"{entry['architecture']} {entry['exporter']} {entry['attention']}"
    if "error" in entry:
        return f"{head}: {entry['error']}"
    cells = [f"{name} {row['fused']}/{row['count']}" for name, row in entry["structures"].items() if row["count"]]
    lines = [f"    {why}" for row in entry["structures"].values() for why in row.get("why", ())]
    return "\n".join([f"{head}: {', '.join(cells)} {entry['verified'] or ''}", *lines, *entry["dropped"]])
