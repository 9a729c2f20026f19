from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from lmi_server.artifacts.progress import LogProgress, Progress, TerminalProgress, show_progress

MIB = 1 << 20


def test_the_log_gets_the_first_the_last_and_one_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    show = LogProgress("model", lambda: now)
    for done in range(101):
        now = done / 4
        show(Progress("downloading", done * MIB, 100 * MIB))
    show(Progress("downloading", 100 * MIB, 100 * MIB))
    assert caplog.messages == [
        "[model] downloading: 0 bytes of 100.0 MiB (0 %)",
        "[model] downloading: 40.0 MiB of 100.0 MiB (40 %)",
        "[model] downloading: 80.0 MiB of 100.0 MiB (80 %)",
        "[model] downloading: 100.0 MiB of 100.0 MiB (100 %)",
    ]


def test_work_without_bytes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LogProgress("model")(Progress("installing requirements.txt"))
    assert caplog.messages == ["[model] installing requirements.txt"]


def test_a_terminal_gets_one_bar_for_each_thing() -> None:
    bars = Bars(console=Console(file=io.StringIO(), force_terminal=True))
    show = TerminalProgress(bars)
    for what, done in (("first", 1), ("second", 5), ("first", 10)):
        show(Progress(what, done, 10))
    assert [(task.description, task.completed, task.total) for task in bars.tasks] == [
        ("first", 10, 10),
        ("second", 5, 10),
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_for_terminals_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with show_progress("model", stream) as show:
            show(Progress("downloading", 5, 10))
    assert "downloading" in terminal.getvalue()
    assert (file.getvalue(), caplog.messages) == ("", ["[model] downloading: 5 bytes of 10 bytes (50 %)"])
