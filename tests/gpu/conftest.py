"""Triton's interpreter, where it takes the place of a GPU.

The tests of tests/engines/rolling_batch/test_interpreted_kernels.py take 31 s of a processor with it, not 66 s.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter

    quick_interpreter.install()
