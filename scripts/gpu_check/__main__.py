"""Checks and measures this project on a machine with a GPU by NVIDIA, in eight minutes, and prints tables.

    python3 -m scripts.gpu_check [--out DIRECTORY] [SECTION ...]

It needs torch for CUDA, this project with the extra `huggingface`, pytest with pytest-xdist, and the tokenizer of the
demo model (`make demo-model`); no network. Weights are random, and made on the device. Without names every section
runs, the cheapest first. Each is a process with a limit, so that one that fails or hangs costs its own figures only.
`--dry-run` runs all of it with tiny models on the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.gpu_check.report import tables

TOKENS_OF_OTHERS = "16"
SLOWER = 10  # times as long a section may take in a dry run, on whatever processor, beside whatever runs there
NO_TESTS = 5  # pytest's exit code where all files are skipped


@dataclass(frozen=True)
class Section:
    """A process that prints a line of JSON last, or whose exit code is its result (`is_test`)."""

    name: str
    limit_s: int
    command: list[str]
    is_test: bool = False


def sections(dry_run: bool) -> Iterator[Section]:
    """Yield what to run, with the processor in the place of the GPU in a dry run."""
    device, tokens = ("cpu", "4") if dry_run else ("cuda", "64")
    demo, large = ("tiny", "tiny") if dry_run else ("demo", "8b")
    counts = ["1", "2"] if dry_run else ["1", "8", "32", "64", "128", "256"]
    python = [sys.executable, "-m"]

    def contender(name: str, shape: str, limit_s: int, counts: list[str] = counts, tokens: str = tokens) -> Section:
        label = "8b" if shape == large and not dry_run else "demo"
        return Section(f"{label}-{name}", limit_s, [
            *python, "scripts.gpu_check.contenders", name, shape, device, tokens, *counts
        ])  # fmt: skip

    def profiled(label: str, shape: str) -> Section:
        count = "2" if dry_run else "64"
        return Section(f"{label}-step", 60, [*python, "scripts.gpu_check.step_profile", shape, device, count])

    def mixed(label: str, shape: str) -> Section:
        count = "2" if dry_run else "63"
        few_rows = ["--rows", "16"] if dry_run else []  # without kernels each row gathers a whole context
        return Section(f"{label}-mixed", 90, [*python, "scripts.gpu_check.mixed", shape, device, count, *few_rows])

    yield contender("bandwidth", large, 30)
    yield contender("ours", demo, 90)
    yield profiled("demo", demo)
    yield mixed("demo", demo)
    asked = ["2", "8"] if dry_run else ["64", "2000"]
    yield Section("demo-penalties", 60, [*python, "scripts.gpu_check.penalties", demo, device, *asked])
    yield contender("http", demo, 120)
    few = counts[:2] if dry_run else ["1", "8", "64"]
    if not dry_run:
        yield contender("ours", large, 120)
        yield Section("8b-one-step", 60, [*python, "scripts.gpu_check.step_profile", large, device, "1"])
        yield profiled("8b", large)
        yield mixed("8b", large)
    yield contender("adapters", large, 60, few)
    yield contender("prompts", large, 60, few[:2])
    if not dry_run:  # on the CPU weights in 8-bit floats are refused
        yield contender("fp8", large, 60, few)
    for weights in ("w4a16", "fp8-blocks", "q8_0"):
        yield contender(weights, large, 60, few)
    yield Section(
        "tests",
        200,
        [*python, "pytest", "-q", "-p", "no:benchmark", "-n", "8", "--dist", "loadfile", "tests/gpu"],
        is_test=True,
    )
    # transformers takes up to a hundred times as long for a token: a few of them show it.
    yield contender("generate", demo, 60, few, TOKENS_OF_OTHERS)
    yield contender("continuous", demo, 60, few[-1:], TOKENS_OF_OTHERS)
    if not dry_run:
        yield contender("generate", large, 60, ["1", "64"], TOKENS_OF_OTHERS)
        yield contender("continuous", large, 60, ["64"], TOKENS_OF_OTHERS)


def run(section: Section) -> dict[str, Any]:
    """Run a section. Return what it printed last, or why there is nothing."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            section.command,
            capture_output=True,
            text=True,
            timeout=section.limit_s,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stderr or b"").decode(errors="replace")  # bytes, although text was asked for
        return {"error": f"took more than {section.limit_s} s", "output": _end(output)}
    lines = done.stdout.strip().splitlines() or [""]
    took = {"seconds": round(time.monotonic() - began, 1)}
    if section.is_test and done.returncode in (0, NO_TESTS):
        return {"summary": lines[-1]} | took
    if done.returncode:
        output = done.stdout + done.stderr if section.is_test else done.stderr
        return {"error": f"exit code {done.returncode}", "output": _end(output)} | took
    result: dict[str, Any] = json.loads(lines[-1])
    return result | took


def _end(text: str) -> str:
    return text[-3000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="the sections to run, all if none is named")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the processor")
    parser.add_argument("--out", type=Path, help="where results.json goes")
    asked = parser.parse_args()
    slower = SLOWER if asked.dry_run else 1
    known = {section.name: replace(section, limit_s=section.limit_s * slower) for section in sections(asked.dry_run)}
    if unknown := set(asked.sections) - set(known):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results: dict[str, dict[str, Any]] = {}
    for name in asked.sections or known:
        results[name] = run(known[name])
        print(f"{name}: {results[name].get('error', 'done')} ({results[name].get('seconds', '-')} s)", flush=True)
        if asked.out is not None:  # what came before a limit cuts the run off is kept
            (asked.out / "results.json").write_text(json.dumps(results, indent=1))
    print(tables(results))
    sys.exit(1 if any("error" in result for result in results.values()) else 0)


if __name__ == "__main__":
    main()
