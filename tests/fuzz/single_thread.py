"""Let onnxruntime use one thread in a process that imports this: the fuzzer runs a process for each core."""

import onnxruntime

_SessionOptions = onnxruntime.SessionOptions


def single_threaded() -> onnxruntime.SessionOptions:
    """Return options of a session that computes in one thread."""
    options = _SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


onnxruntime.SessionOptions = single_threaded
