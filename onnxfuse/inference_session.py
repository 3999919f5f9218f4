"""Open onnxruntime sessions in which fused nodes run as kernels, while the CUDA provider starts.

The provider starts in a thread, and meanwhile the modules are imported that a session needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from onnxfuse.errors import NO_ONNXRUNTIME, MissingPackageError

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingPackageError(f"{NO_ONNXRUNTIME} ({error})") from error

from onnxfuse.runtime.start_provider import ProviderOptions, Providers, start_early

if TYPE_CHECKING:
    from onnxfuse.runtime.plan import Aim
    from onnxfuse.tuning.dispatch import TunePolicy


def InferenceSession(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[ProviderOptions] | None = None,
    *,
    tune: TunePolicy = "cached",
    shapes: Mapping[str, Sequence[int]] | None = None,
    plans: str | os.PathLike[str] | None = None,
    aim: Aim = "latency",
    wait: bool = False,
    **arguments: object,
) -> ort.InferenceSession:
    """Open an ordinary onnxruntime session in which fused nodes run as kernels, where this GPU has kernels for them.

    tune    "cached": earlier measurements decide between kernel and body, and between the plans of a kernel; nodes
            without measurements run as kernels, by the plans that are expected to be the fastest.
            "now": nodes without measurements are measured first, at the sizes of the model's inputs.
            "background": as "cached"; while no run of a session with this setting is in flight, a thread measures the
            plans of the kernels that run most, one node and shape after another, and later runs use the fastest. Their
            results may then differ by rounding. The thread ends with the last of these sessions. Nodes that run by a
            plan file keep its plans. Nodes of a session with CUDA graphs keep their plans, too, but later sessions use
            the measurements.
            "never": all nodes run as kernels, by the plans that are expected to be the fastest.
    shapes  for "now": the sizes of inputs with dynamic dims, as {"input_ids": (8, 512)}
    plans   a file that `onnxfuse compile` wrote; kernels are loaded from it instead of planned and compiled. The
            default is model.onnx.plans next to model.onnx, if there is one. A file that does not fit (another GPU,
            version or aim) is not used, and a warning says why; if the model has changed, the nodes that the file lacks
            are planned. Later sessions of the process use the file for equal nodes, too. It contains machine code: use
            only files that you trust.
    aim     "throughput": kernels are planned for several runs at the same time, as in a server with several threads.
            Matrix products then leave more of the GPU to other runs (on Hopper GPUs), and a single run takes longer.
            Measurements are not used, because they time each kernel alone. A plan file is for sessions of one aim.
    wait    whether the session and its runs wait for plans and the compiler. If not, nodes whose kernels are not
            planned, compiled and loaded yet run by other kernels or as their bodies meanwhile; the results of these
            runs may differ by rounding from those of later runs. Sessions with `enable_cuda_graph` always wait, because
            a CUDA graph keeps what its first runs launched. The environment variable ONNXFUSE_WAIT=1 makes all wait.

    If a node's kernel does not compile, now or at sizes that occur later, its body runs instead; a warning says so.

    Without `providers`, the session uses CUDA where onnxruntime has it, and the CPU for other nodes; onnxruntime's own
    default is the CPU alone.

    Other arguments are passed to onnxruntime.InferenceSession. Several threads can call this function with the same
    `sess_options`, but onnxruntime.InferenceSession must not use them at the same time. If nodes run as kernels,
    `enable_fallback` is 0 unless it is given, and `set_providers` with other providers fails, because these have no
    kernels.

    Raises ModelError for a model with operators or attributes of onnxfuse that this version does not know, UsageError
    for "now" without a size of every dynamic dim, for plans that do not exist, and for "now" and "background" with
    "throughput".
    """
    start_early(sess_options, providers, provider_options)
    given = (path_or_bytes, sess_options, providers, provider_options, tune, shapes, plans, aim, wait)
    session: ort.InferenceSession = import_module("onnxfuse.session").opened(*given, **arguments)
    return session
