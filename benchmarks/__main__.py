"""Runs every benchmark, one after the other, each in a process of its own: `python -m benchmarks` (`make bench`)."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "benchmarks.embeddings",
    "benchmarks.generation",
    "benchmarks.memory",
    "benchmarks.ranks",
    "benchmarks.relay",
    "benchmarks.own_code",
)

if __name__ == "__main__":
    codes = [subprocess.run([sys.executable, "-m", name], check=False).returncode for name in BENCHMARKS]
    sys.exit(max(codes))
