"""Save plans with their machine code in a file, and load them on GPUs of the same kind: JSON and cubins in a zip."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime import planner, run_plan
from onnxfuse.runtime.cupy_backend import LoadedKernel
from onnxfuse.runtime.environment import kernels_digest
from onnxfuse.runtime.plan import (
    Argument,
    Convolution,
    Device,
    FusedNode,
    Im2col,
    Kernel,
    Launch,
    Matmul,
    Matrix,
    NoAlias,
    Plan,
    Pointer,
    Scalar,
    Step,
    TensorMap,
    TensorSpec,
)
from onnxfuse.runtime.planner import Backend, PlannedNode, backends, signature
from onnxfuse.version import __version__

FORMAT: Final = 5
INDEX: Final = "plans.json"


class PlanFileError(OnnxfuseError):
    """A plan file cannot be read, or is not for this GPU or version."""


def save_plans(path: str | Path, provider: str = "CUDAExecutionProvider", device_id: int = 0) -> int:
    """Write the plans that the sessions of this process have made on GPUs like `device_id`; return how many.

    Raises PlanFileError if the file cannot be written, UsageError for a provider that has no kernels.
    """
    backend = _backend(provider)
    device = backend.device(device_id)
    of_kind = (planned for planned in planner.plans_in_use() if _gpu_kind(planned.device) == _gpu_kind(device))
    plans = {signature(planned.node, planned.inputs, planned.device): planned for planned in of_kind}
    cubins: dict[str, bytes] = {}
    records = []
    for planned in plans.values():
        launches = [step for step in planned.plan.steps if isinstance(step, Launch)]
        names = [_cubin_name(step.kernel) for step in launches]
        for name, step, loaded in zip(names, launches, planned.kernels, strict=True):
            if name not in cubins:
                module = loaded.module
                cubins[name] = (
                    module.cubin if isinstance(module, _Module) else backend.machine_code(step.kernel, device)
                )
        records.append({**_record(planned), "cubins": names})
    index = {
        "format": FORMAT,
        "onnxfuse": __version__,
        "kernels": kernels_digest(),
        "device": _gpu_kind(device),
        "cublaslt": run_plan.cublaslt_version() if any(map(_has_algorithm, plans.values())) else None,
        "cudnn": run_plan.cudnn_version() if any(map(_has_engine, plans.values())) else None,
        "cubins": {name: hashlib.sha256(code).hexdigest() for name, code in cubins.items()},
        "plans": records,
    }
    _write(Path(path), index, cubins)
    return len(records)


def load_plans(path: str | Path, provider: str = "CUDAExecutionProvider", device_id: int = 0) -> int:
    """Use a file's plans from now on, before those of files that were loaded earlier; return how many.

    Raises PlanFileError, and uses none, if one of them is malformed or the file is for another GPU or version;
    UsageError for a provider that has no kernels.
    """
    here = _gpu_kind(_backend(provider).device(device_id))
    index, cubins = _read(Path(path))
    if index["device"] != here:
        raise PlanFileError(f"{path}: made for {_describe(index['device'])}, this GPU is {_describe(here)}")
    if index.get("kernels") != kernels_digest():
        raise PlanFileError(f"{path}: made from other kernels than this onnxfuse has; make it again")
    _check_cublaslt(path, index.get("cublaslt"))
    _check_cudnn(path, index.get("cudnn"))
    try:
        entries = [_read_record(record, here) for record in index["plans"]]
        plans = {signature(p.node, p.inputs, p.device): (p, names) for p, names in entries}
        if missing := {name for _, names in plans.values() for name in names} - set(cubins):
            raise KeyError(f"cubin {min(missing)}")
    except Exception as error:  # a JSON file may hold any value anywhere
        raise PlanFileError(f"{path}: a plan is malformed: {type(error).__name__}: {error}") from error
    loaded: dict[tuple[str, str, int], LoadedKernel] = {}

    def load(name: str, step: Launch, ordinal: int) -> LoadedKernel:
        key = (name, step.kernel.entry, ordinal)
        if key not in loaded:
            loaded[key] = _load_cubin(cubins[name], step.kernel.entry, ordinal)
        return planner.allow_launch(loaded[key], step, ordinal)

    def find(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> PlannedNode | None:
        found = plans.get(signature(node, inputs, device))
        if found is None or _gpu_kind(device) != here:
            return None
        plan, names = found[0].plan, found[1]
        launches = (step for step in plan.steps if isinstance(step, Launch))
        kernels = tuple(load(name, step, device.ordinal) for name, step in zip(names, launches, strict=True))
        return PlannedNode(node, inputs, device, plan, kernels)

    planner.add_plan_file(str(Path(path).resolve()), find)
    return len(plans)


def _backend(provider: str) -> Backend:
    if provider not in backends:
        raise UsageError(f"kernels run on {', '.join(backends)}, not on {provider}; there are no plans")
    return backends[provider]


def _gpu_kind(device: Device) -> dict[str, str | int]:
    """Return the properties that two GPUs must share to run the same machine code."""
    return {name: value for name, value in vars(device).items() if name not in ("tf32", "ordinal")}


def _has_algorithm(planned: PlannedNode) -> bool:
    return any(isinstance(step, Matmul) and step.algorithm for step in planned.plan.steps)


def _check_cublaslt(path: str | Path, version: object) -> None:
    """Raise PlanFileError for another version of cuBLASLt: only the one that proposed an algorithm can read it."""
    if version is not None and version != (found := run_plan.cublaslt_version()):
        raise PlanFileError(f"{path}: its products were chosen for cuBLASLt {version}, this is {found}; make it again")


def _has_engine(planned: PlannedNode) -> bool:
    return any(isinstance(step, Convolution) and step.engine for step in planned.plan.steps)


def _check_cudnn(path: str | Path, version: object) -> None:
    """Raise PlanFileError for another version of cuDNN: engines and knobs have other numbers there."""
    if version is not None and version != (found := run_plan.cudnn_version()):
        raise PlanFileError(f"{path}: its convolutions were chosen for cuDNN {version}, this is {found}; make it again")


@dataclasses.dataclass(eq=False)
class _Module:
    """A loaded cubin, which is unloaded with the last kernel that needs it."""

    cubin: bytes
    ordinal: int
    handle: int  # CUmodule

    def __del__(self) -> None:
        native.load().onnxfuse_unload(self.ordinal, self.handle)


def _load_cubin(cubin: bytes, entry: str, ordinal: int) -> LoadedKernel:
    module, function = native.load_function(native.load(), ordinal, cubin, entry)
    return LoadedKernel(function, _Module(cubin, ordinal, module))


def _cubin_name(kernel: Kernel) -> str:
    text = json.dumps([kernel.source, kernel.entry, dict(kernel.defines), kernel.arch_specific], sort_keys=True)
    return f"{kernel.source}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"


# --- records of plans -------------------------------------------------------------------------------------------------


def _record(planned: PlannedNode) -> dict[str, Any]:
    node, plan = planned.node, planned.plan
    return {
        "node": {**vars(node), "name": "", "attributes": dict(node.attributes)},
        "tf32": planned.device.tf32,
        "inputs": [dataclasses.asdict(spec) for spec in planned.inputs],
        "outputs": [dataclasses.asdict(spec) for spec in plan.outputs],
        "scratch": plan.scratch,
        "steps": [_step(step) for step in plan.steps],
        "no_alias": [dataclasses.asdict(each) for each in plan.no_alias],
    }


def _step(step: Step) -> dict[str, Any]:
    if isinstance(step, Matmul):
        return {"matmul": dataclasses.asdict(step)}
    if isinstance(step, Convolution):
        return {"convolution": dataclasses.asdict(step)}
    kernel = {**vars(step.kernel), "defines": dict(step.kernel.defines)}
    return {**vars(step), "kernel": kernel, "arguments": [dataclasses.asdict(argument) for argument in step.arguments]}


def _read_record(record: Mapping[str, Any], gpu: Mapping[str, Any]) -> tuple[PlannedNode, tuple[str, ...]]:
    """Return the node and its cubins; the native library checks sizes and indices when the plan is used."""
    node = record["node"]
    steps = tuple(map(_read_step, record["steps"]))
    names = tuple(map(str, record["cubins"]))
    launches = sum(isinstance(step, Launch) for step in steps)
    if len(names) != launches:
        raise ValueError(f"{launches} launches, {len(names)} cubins")
    fused = FusedNode(
        node["fusion"], "", tuple(node["operands"]), dict(node["attributes"]), tuple(node["output_dtypes"])
    )
    no_alias = tuple(NoAlias(**each) for each in record["no_alias"])
    plan = Plan(_specs(record["outputs"]), steps, tuple(map(int, record["scratch"])), no_alias)
    device = Device(**gpu, tf32=bool(record["tf32"]))
    return PlannedNode(fused, _specs(record["inputs"]), device, plan, ()), names


def _read_step(step: Mapping[str, Any]) -> Step:
    if "matmul" in step:
        return _read_matmul(step["matmul"])
    if "convolution" in step:
        return _read_convolution(step["convolution"])
    return Launch(
        Kernel(**step["kernel"]),
        _triple(step["grid"]),
        _triple(step["block"]),
        tuple(map(_read_argument, step["arguments"])),
        int(step["shared"]),
        int(step["cluster"]),
        bool(step["pdl"]),
    )


def _read_argument(fields: Mapping[str, Any]) -> Argument:
    if "box" in fields:
        sequences = {name: tuple(map(int, fields[name])) for name in ("sizes", "strides", "box")}
        walk = fields["im2col"] and Im2col(**{name: tuple(map(int, of)) for name, of in fields["im2col"].items()})
        return TensorMap(**{**fields, **sequences, "pointer": Pointer(**fields["pointer"]), "im2col": walk})
    return Pointer(**fields) if "kind" in fields else Scalar(**fields)


def _read_matmul(fields: Mapping[str, Any]) -> Matmul:
    pointers = {name: fields[name] and Pointer(**fields[name]) for name in ("bias", "workspace")}
    matrices = {
        name: fields[name] and Matrix(**{**fields[name], "pointer": Pointer(**fields[name]["pointer"])})
        for name in ("x", "w", "y", "c")
    }
    return Matmul(**{**fields, **pointers, **matrices, "algorithm": tuple(map(int, fields["algorithm"]))})


def _read_convolution(fields: Mapping[str, Any]) -> Convolution:
    pointers = {
        name: fields[name] and Pointer(**fields[name]) for name in ("x", "w", "y", "bias", "residual", "workspace")
    }
    names = ("sizes", "y_sizes", "kernel", "strides", "dilations", "pads_begin", "pads_end", "engine")
    return Convolution(**{**fields, **pointers, **{name: tuple(map(int, fields[name])) for name in names}})


def _specs(records: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tuple(map(int, r["shape"])), str(r["dtype"]), bool(r["aligned"]), bool(r["constant"]))
        for r in records
    )


def _triple(values: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = map(int, values)
    return x, y, z


def _describe(device: Mapping[str, object]) -> str:
    return f"{device.get('name')} (sm_{device.get('arch')}, {device.get('multiprocessors')} multiprocessors)"


# --- the file ---------------------------------------------------------------------------------------------------------


def _write(path: Path, index: Mapping[str, Any], cubins: Mapping[str, bytes]) -> None:
    part = path.with_name(f"{uuid.uuid4().hex}.part")  # other processes may write the same file now
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(INDEX, json.dumps(index, indent=1))
            for name, code in cubins.items():
                file.writestr(name, code)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise PlanFileError(f"{path}: cannot be written: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as file:
            index = json.loads(file.read(INDEX))
            if index["format"] != FORMAT or index["onnxfuse"] != __version__:
                raise PlanFileError(
                    f"{path}: written by onnxfuse {index['onnxfuse']} (format {index['format']}), "
                    f"this is {__version__} (format {FORMAT}); make it again"
                )
            cubins = {name: file.read(name) for name in index["cubins"]}
        for name, digest in index["cubins"].items():
            if hashlib.sha256(cubins[name]).hexdigest() != digest:
                raise PlanFileError(f"{path}: {name} is corrupted; make the file again")
        if not isinstance(index["device"], dict) or not isinstance(index["plans"], list):
            raise TypeError("device or plans")
    except PlanFileError:
        raise
    except Exception as error:  # zipfile's errors have no common class, and a JSON file may hold any value anywhere
        raise PlanFileError(f"{path}: no plan file, or corrupted: {type(error).__name__}: {error}") from error
    return index, cubins
