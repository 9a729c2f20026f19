"""Programs that fetch or install: what is kept of what they print."""

from __future__ import annotations

import sys

import pytest

from lmi_server.artifacts import child_process
from lmi_server.artifacts.child_process import run_child
from lmi_server.artifacts.progress import Activity

MIB = 1 << 20


@pytest.mark.parametrize("whole", [False, True])
def test_the_end_of_an_output_is_returned(whole: bool) -> None:
    code = f"import sys; print('a' * {3 * MIB}, 'end'); print('b' * {3 * MIB}, 'end', file=sys.stderr)"
    ended = run_child([sys.executable, "-c", code], environment={}, activity=Activity(), whole_output=whole)
    assert ended.stdout.endswith("a end\n")
    assert ended.stderr.endswith("b end\n")
    assert len(ended.stdout) == (3 * MIB + 5 if whole else MIB)
    assert len(ended.stderr) == MIB


def test_an_endless_output_does_not_fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_MAX_ON_DISK", MIB)
    code = (
        "import os, time\n"
        f"os.write(1, b'a' * {4 * MIB})\n"
        f"while os.fstat(1).st_blocks * 512 > {MIB}: time.sleep(0.01)\n"
        "print('end')"
    )
    ended = run_child([sys.executable, "-c", code], environment={}, activity=Activity(), limit_s=60)
    assert (ended.code, ended.stdout) == (0, "end\n")
