"""`python -m scripts.gpu_check`: its dry run on the processor, and what it makes of a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.__main__ import Section, run
from scripts.gpu_check.report import tables
from scripts.gpu_check.timeline import busy_and_gaps


@pytest.mark.slow
def test_a_dry_run_measures_and_prints_a_table(demo_model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.gpu_check", "--dry-run", "--out", str(tmp_path)]
    sections = ["demo-ours", "demo-step", "demo-mixed", "demo-penalties", "demo-w4a16", "demo-fp8-blocks"]
    done = subprocess.run([*command, *sections], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("demo-ours", "demo-w4a16", "demo-fp8-blocks"):
        assert f"| {name} |" in done.stdout
    assert "demo-step: 2 requests, " in done.stdout
    assert "| demo-mixed, 2 decode | tokens/s |" in done.stdout
    assert "| prompts of 5, eager |" in done.stdout
    assert "demo-penalties: 2 requests with prompts of 8 tokens, a step takes " in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["demo-ours"]["rates"]) == {"1", "2"}


def test_a_section_that_does_not_exist_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "scripts.gpu_check", "--dry-run", "demo-theirs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such section: demo-theirs; there are " in done.stderr


def test_a_section_that_fails_or_hangs_costs_its_own_figures_only() -> None:
    python = [sys.executable, "-c"]
    failed = run(Section("failed", 30, [*python, "import sys; sys.exit('no such card')"]))
    assert failed["error"] == "exit code 1"
    hung = run(Section("hung", 5, ["sh", "-c", "printf 'one\\ntwo' >&2; exec sleep 60"]))  # sh starts at once
    assert hung == {"error": "took more than 5 s", "output": "one\ntwo"}
    good = run(Section("good", 30, [*python, 'print(\'{"rates": {"8": 12.4}}\')']))
    printed = tables({"failed": failed, "hung": hung, "good": good})
    assert "failed failed, exit code 1\nno such card" in printed
    assert "| good | 12 |" in printed


def test_gaps_are_the_times_in_which_no_kernel_runs() -> None:
    busy, gaps = busy_and_gaps([(10.0, 12.0), (0.0, 4.0), (3.0, 5.0), (11.0, 15.0), (12.0, 13.0), (15.0, 16.0)])
    assert (busy, gaps) == (11.0, [5.0])
