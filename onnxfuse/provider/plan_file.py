"""Plans in a file: JSON and cubins in a zip, for GPUs of the kind that made them."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from onnxfuse.errors import OnnxfuseError
from onnxfuse.provider import native, planner
from onnxfuse.provider.compile import Function
from onnxfuse.provider.plan import FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.provider.planner import Planned, backends, signature

FORMAT: Final = 1
INDEX: Final = "plans.json"


class PlanFileError(OnnxfuseError):
    """A plan file cannot be read, or is not for this GPU or version."""


def save_plans(path: str | Path, provider: str = "CUDAExecutionProvider", device_id: int = 0) -> int:
    """Write the plans that living sessions have made on GPUs like `device_id`; the number of plans."""
    backend = backends[provider]
    device = backend.device(device_id)
    plans = {signature(p.node, p.inputs): p for p in planner.living() if p.device == device}
    kernels: dict[str, bytes] = {}
    records = []
    for planned in plans.values():
        steps = planned.plan.steps[: len(planned.functions)]
        names = [_kernel_name(step.kernel) for step in steps]
        for name, step, function in zip(names, steps, planned.functions, strict=True):
            if name not in kernels:
                own = isinstance(function.keep, _Module)
                kernels[name] = function.keep.cubin if own else backend.cubin(step.kernel, device)
        records.append({**_record(planned), "cubins": names})
    index = {
        "format": FORMAT,
        "onnxfuse": version("onnxfuse"),
        "device": dataclasses.asdict(device),
        "cubins": {name: hashlib.sha256(code).hexdigest() for name, code in kernels.items()},
        "plans": records,
    }
    _write(Path(path), index, kernels)
    return len(records)


def load_plans(path: str | Path, provider: str = "CUDAExecutionProvider", device_id: int = 0) -> int:
    """Use a file's plans from now on; the number of plans.  Raises PlanFileError, and uses none, where one is bad."""
    index, cubins = _read(Path(path))
    device = backends[provider].device(device_id)
    made_for = index["device"]
    if made_for != dataclasses.asdict(device):
        here = dataclasses.asdict(device)
        raise PlanFileError(f"{path}: made for {_describe(made_for)}, this GPU is {_describe(here)}")
    try:
        plans = {signature(*entry[:2]): entry for entry in map(_entry, index["plans"])}
        if missing := {name for entry in plans.values() for name in entry[3]} - set(cubins):
            raise KeyError(f"cubin {min(missing)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanFileError(f"{path}: a plan is malformed: {type(error).__name__}: {error}") from error
    modules: dict[tuple[str, str, int], Function] = {}

    def find(node: FusedNode, inputs: tuple[TensorSpec, ...], ordinal: int) -> Planned | None:
        found = plans.get(signature(node, inputs))
        if found is None or backends[provider].device(ordinal) != device:
            return None
        functions = []
        for step, name in zip(found[2].steps, found[3], strict=False):
            key = (name, step.kernel.entry, ordinal)
            if key not in modules:
                modules[key] = _load(cubins[name], step.kernel.entry, ordinal)
            functions.append(planner._ready(modules[key], step, ordinal))
        return Planned(node, inputs, device, found[2], tuple(functions))

    planner.stored.append(find)
    return len(plans)


@dataclasses.dataclass(eq=False)
class _Module:
    """A loaded cubin, unloaded with the last function that needs it."""

    cubin: bytes
    ordinal: int
    handle: int

    def __del__(self) -> None:
        native.load().onnxfuse_unload(self.ordinal, self.handle)


def _load(cubin: bytes, entry: str, ordinal: int) -> Function:
    module, function = native.load_function(native.load(), ordinal, cubin, entry)
    return Function(function, _Module(cubin, ordinal, module))


def _kernel_name(kernel: Kernel) -> str:
    text = json.dumps([kernel.source, kernel.entry, dict(kernel.defines), kernel.arch_specific], sort_keys=True)
    return f"{kernel.source}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"


def _record(planned: Planned) -> dict[str, Any]:
    node, plan = planned.node, planned.plan
    return {
        "node": {**vars(node), "name": "", "attributes": dict(node.attributes)},
        "inputs": [dataclasses.asdict(spec) for spec in planned.inputs],
        "outputs": [dataclasses.asdict(spec) for spec in plan.outputs],
        "scratch": plan.scratch,
        "steps": [_step(step) for step in plan.steps[: len(planned.functions)]],
    }


def _step(step: Launch) -> dict[str, Any]:
    kernel = {**vars(step.kernel), "defines": dict(step.kernel.defines)}
    return {**vars(step), "kernel": kernel, "arguments": [vars(argument) for argument in step.arguments]}


def _entry(record: Mapping[str, Any]) -> tuple[FusedNode, tuple[TensorSpec, ...], Plan, tuple[str, ...]]:
    """A record back as what it was; the native library checks sizes and indices when the plan is used."""
    node = record["node"]
    steps = tuple(
        Launch(
            Kernel(**step["kernel"]),
            _triple(step["grid"]),
            _triple(step["block"]),
            tuple(Pointer(**a) if "kind" in a else Scalar(**a) for a in step["arguments"]),
            int(step["shared"]),
            int(step["cluster"]),
        )
        for step in record["steps"]
    )
    names = tuple(map(str, record["cubins"]))
    if len(names) != len(steps):
        raise ValueError(f"{len(steps)} steps, {len(names)} cubins")
    fused = FusedNode(
        node["fusion"], "", tuple(node["operands"]), dict(node["attributes"]), tuple(node["output_dtypes"])
    )
    plan = Plan(_specs(record["outputs"]), steps, tuple(map(int, record["scratch"])))
    return fused, _specs(record["inputs"]), plan, names


def _specs(records: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(map(int, r["shape"])), str(r["dtype"]), bool(r["aligned"])) for r in records)


def _triple(values: Any) -> tuple[int, int, int]:
    x, y, z = map(int, values)
    return x, y, z


def _describe(device: Mapping[str, Any]) -> str:
    return f"{device.get('name')} (sm_{device.get('arch')}, {device.get('multiprocessors')} multiprocessors)"


def _write(path: Path, index: Mapping[str, Any], cubins: Mapping[str, bytes]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(INDEX, json.dumps(index, indent=1))
            for name, code in cubins.items():
                file.writestr(name, code)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PlanFileError(f"{path}: cannot be written: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as file:
            index = json.loads(file.read(INDEX))
            if index["format"] != FORMAT or index["onnxfuse"] != version("onnxfuse"):
                raise PlanFileError(
                    f"{path}: written by onnxfuse {index['onnxfuse']} (format {index['format']}), "
                    f"this is {version('onnxfuse')} (format {FORMAT}); make it again"
                )
            cubins = {name: file.read(name) for name in index["cubins"]}
        for name, digest in index["cubins"].items():
            if hashlib.sha256(cubins[name]).hexdigest() != digest:
                raise PlanFileError(f"{path}: {name} is corrupted; make the file again")
        if not isinstance(index["device"], dict) or not isinstance(index["plans"], list):
            raise TypeError("device or plans")
    except (OSError, zipfile.BadZipFile, zipfile.zlib.error, ValueError, KeyError, TypeError, EOFError) as error:  # type: ignore[attr-defined]
        raise PlanFileError(f"{path}: no plan file, or corrupted: {type(error).__name__}: {error}") from error
    return index, cubins
