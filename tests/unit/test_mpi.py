"""What mpirun writes before the lines of its ranks."""

from __future__ import annotations

import pytest

from lmi_server.machine.mpi import rank_of_line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1,0]<stdout>: INFO x: y", (0, "INFO x: y")),
        ("[52345,11]<stderr>:text", (11, "text")),
        ("[3] text", (3, "text")),
        ("prterun noticed that process rank 0", (None, "prterun noticed that process rank 0")),
        ("[vm:17554] *** End of error message ***", (None, "[vm:17554] *** End of error message ***")),
    ],
)
def test_the_rank_of_a_line(line: str, expected: tuple[int | None, str]) -> None:
    assert rank_of_line(line) == expected
