"""Runs every benchmark in turn, each in its own process: `python -m benchmarks` (`make bench`)."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "benchmarks.batches",
    "benchmarks.block_linears",
    "benchmarks.embeddings",
    "benchmarks.few_bits",
    "benchmarks.generation",
    "benchmarks.kv_cache",
    "benchmarks.large_pages",
    "benchmarks.memory",
    "benchmarks.observability",
    "benchmarks.overload",
    "benchmarks.own_code",
    "benchmarks.ranks",
    "benchmarks.relay",
    "benchmarks.scheduling",
    "benchmarks.speculation",
    "benchmarks.states",
    "benchmarks.structured_output",
    "benchmarks.vllm_server",
)

if __name__ == "__main__":
    codes = [subprocess.run([sys.executable, "-m", name], check=False).returncode for name in BENCHMARKS]
    sys.exit(max(codes))
