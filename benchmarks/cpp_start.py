"""The time from the start of a C++ process to its first answer: onnxruntime, and onnxfuse by a plan file.

    python benchmarks/cpp_start.py model.onnx input_ids=8x128 attention_mask=8x128 [--runs 10] [--out FILE.json]

The program is examples/cpp/run_model.cc.  Both engines run on a GPU, in turns; the model is optimized and compiled
before, and a first process of each is not counted, because it brings the files into the memory of the machine.
"""

from __future__ import annotations

import argparse
import datetime
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_text import result_text

import onnxfuse
from onnxfuse.bench.machine import device, versions
from onnxfuse.ir.save import save
from onnxfuse.runtime import native_library as native

BUILD = Path(__file__).parents[1] / "examples" / "cpp" / "build_example.py"


def seconds(command: list[str]) -> tuple[float, float]:
    """Run the program; return the seconds to its first answer, and the milliseconds that it says later runs take."""
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        answered = time.monotonic() - start
        later = re.search(r"later runs take (\S+) ms", process.stdout.read())
    if process.returncode or not later:
        raise SystemExit(f"{' '.join(command)} failed")
    return answered, float(later[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("shapes", nargs="+", metavar="INPUT=8x128")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fused, plans = folder / "fused.onnx", folder / "fused.plans"
        save(onnxfuse.optimize(arguments.model, verify=False)[0], fused, folder=arguments.model.parent)
        subprocess.run([sys.executable, "-m", "onnxfuse", "compile", str(fused), "-o", str(plans)], check=True)
        built = subprocess.run([sys.executable, str(BUILD), name], check=True, capture_output=True, text=True)
        program, plain = built.stdout.strip(), [*arguments.shapes, "cuda"]
        ways = {
            "onnxruntime": [program, str(arguments.model), *plain],
            "onnxfuse": [program, str(fused), *plain, str(native.library_path()), f"onnxfuse.plans={plans}"],
        }
        runs = [{way: seconds(command) for way, command in ways.items()} for _ in range(arguments.runs + 1)][1:]
    rows = []
    for way in ways:
        starts, later = zip(*(run[way] for run in runs), strict=True)
        rows.append({"engine": way, "first_answer_s": statistics.median(starts), "later_ms": statistics.median(later)})
        print("{engine:12} first answer after {first_answer_s:.3f} s, later runs {later_ms:.3f} ms".format(**rows[-1]))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"date": now, "device": device("cuda"), "versions": versions(), "model": arguments.model.name,
             "shapes": arguments.shapes, "runs": arguments.runs}  # fmt: skip
    if arguments.out:
        arguments.out.write_text(result_text({**about, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
