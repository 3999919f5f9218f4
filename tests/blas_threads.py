"""Let NumPy multiply in one thread, because the processes of a test run share the cores; import this before NumPy."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
