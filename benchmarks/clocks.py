"""Sample the clock and the power of a GPU, because products back to back make it lower its clock."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import Final

EVERY_MS: Final = 20
QUERY: Final = "clocks.sm,power.draw.instant"


class Clocks:
    """Samples of the first visible GPU, by nvidia-smi, until the process ends; none if nvidia-smi does not run."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []  # time, MHz, W
        which = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = ["nvidia-smi", "-i", which, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits",
                   "-lms", str(EVERY_MS)]  # fmt: skip
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            return
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # "[N/A]", or an error message
                continue
            self._samples.append((time.perf_counter(), clock, power))

    def since(self, start: float) -> dict[str, float]:
        """Return the medians of the samples since `start`, a time of time.perf_counter; {} if there are none."""
        found = [sample for sample in self._samples if sample[0] >= start]
        if not found:
            return {}
        _, clock, power = (statistics.median(each) for each in zip(*found, strict=True))
        return {"clock_mhz": clock, "power_w": power}
