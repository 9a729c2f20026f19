"""Commands that tests run as forks end by themselves, or at a limit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forked_servers import run_python


def test_a_script_that_does_not_end_is_killed_at_the_limit(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(subprocess.TimeoutExpired, match="endless"):
        run_python([str(script)], {}, limit_s=0.1)


def test_a_script_prints_more_than_a_pipe_holds(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("import sys\nsys.stderr.write('e' * 200_000)\nprint('o' * 200_000)\nsys.exit(3)\n")
    done = run_python([str(script)], {})
    assert (done.returncode, done.stdout, done.stderr) == (3, "o" * 200_000 + "\n", "e" * 200_000)
