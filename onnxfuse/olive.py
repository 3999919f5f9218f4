"""Fuse models in a workflow of Microsoft Olive: the pass `OnnxFuse`.

`python -m onnxfuse.olive package.json` writes Olive's package configuration with this pass in it, which `olive run`
takes as --package-config.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.package_config import OlivePackageConfig
from olive.passes import Pass
from olive.passes.pass_config import BasePassConfig, PassConfigParam

from onnxfuse.errors import VerificationError
from onnxfuse.ir.save import save
from onnxfuse.optimizer import optimize

ALL: Final = ["*"]


class OnnxFuse(Pass):  # type: ignore[misc]  # Olive has no types
    """Fuse an ONNX model, and verify it.

    The parameter `options` holds arguments of `onnxfuse.optimize`, such as {"dtype": "float16"}.  The pass raises
    VerificationError if an output of the fused model differs.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        text = "Arguments of onnxfuse.optimize, such as dtype, emit, fallback or verify."
        return {"options": PassConfigParam(type_=dict, default_value={}, description=text)}

    def _run_for_config(
        self, model: ONNXModelHandler, config: BasePassConfig, output_model_path: str
    ) -> ONNXModelHandler:
        path = Path(resolve_onnx_path(output_model_path))
        fused, report = optimize(model.model_path, **config.options)
        if report.verified.status == "failed":
            raise VerificationError(f"'{model.model_path}' is not fused: {report.verified.reason}")
        save(fused, path, folder=report.folder)
        return ONNXModelHandler(model_path=path.parent, onnx_file_name=path.name)


def package_config() -> dict[str, Any]:
    """Return Olive's package configuration with the pass in it."""
    known: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    known["passes"]["OnnxFuse"] = {
        "module_path": f"onnxfuse.olive.{OnnxFuse.__name__}",
        **{f"supported_{what}": ALL for what in ("providers", "accelerators", "precisions")},
        "supported_algorithms": [],
        "supported_quantization_encodings": [],
    }
    return known


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(package_config(), indent=2), encoding="utf-8")
