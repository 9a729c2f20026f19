from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from lmi_server.artifacts.progress import TERMINAL, Activity, LogProgress, TerminalProgress, show_progress
from lmi_server.contract.progress import Pace, Progress

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_log_gets_the_first_the_last_and_one_line_every_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    show = LogProgress("model", now=clock)
    for done in range(101):
        clock.now = done / 8
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


def test_a_line_says_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    show = LogProgress("model")
    show(Progress("downloading", MIB, 31 * MIB, rate=0.5 * MIB))
    show(Progress("loading weights", 30, 272, rate=4.25, unit="tensors"))
    show(Progress("unpacking", MIB, None, rate=MIB))
    assert caplog.messages == [
        "[model] downloading: 1.0 MiB of 31.0 MiB (3 %), 512.0 KiB/s, 1 min 0 s left",
        "[model] loading weights: 30 of 272 tensors (11 %), 4.2/s, 57 s left",
        "[model] unpacking: 1.0 MiB, 1.0 MiB/s",
    ]


def test_work_without_an_amount_says_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    show = LogProgress("model", now=clock)
    for clock.now in (0.0, 1.0, 70.0):
        show(Progress("installing requirements.txt"))
    assert caplog.messages == [
        "[model] installing requirements.txt",
        "[model] installing requirements.txt, for 1 min 10 s",
    ]


def test_a_load_that_is_short_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    show = LogProgress("model", at_once=False, now=clock)
    for clock.now, done in ((0.0, 0), (4.0, 10)):
        show(Progress("loading weights", done, 10))
    for clock.now, done in ((5.0, 0), (9.0, 1), (11.0, 2), (12.0, 3)):
        show(Progress("compiling kernels", done, 10, unit="kernels"))
    assert caplog.messages == ["[model] compiling kernels: 2 of 10 kernels (20 %)"]


def test_reports_in_quick_succession_go_no_further_but_the_last_does() -> None:
    reports: list[Progress] = []
    activity = Activity(reports.append)
    for done in range(100_001):
        activity.report("downloading", done, 100_000)
    assert len(reports) < 1000
    assert (reports[0].done, reports[-1].done) == (0, 100_000)


def test_the_rate_is_that_of_the_last_seconds_and_begins_with_what_was_there() -> None:
    clock = Clock()
    pace = Pace(clock)
    rates = []
    for second in range(31):
        clock.now = float(second)
        report = pace.report("downloading", 1000 + (100 * second if second <= 10 else 1000), 3000)
        assert report is not None
        rates.append(report.rate)
    assert rates[:3] == [None, 100, 100]
    assert rates[30] == 0
    clock.now += 1
    other = pace.report("checking", 0, 10)
    assert other is not None
    assert other.rate is None


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (Progress("a\nb", -5, -1, float("nan")), Progress("a\\nb", 0, 0)),
        (Progress("a", 1, 7, 5e-324), Progress("a", 1, 7)),
        (Progress("a", 2**60, 7, float("inf")), Progress("a", 7, 7)),
        (Progress("a", 2**62, None, -1.0, "\x1b[2J"), Progress("a", 2**53, None, None, "\\x1b[2J")),
    ],
)
def test_what_a_worker_says_is_bounded(said: Progress, kept: Progress) -> None:
    assert said.bound() == kept
    assert len(Progress("x" * 10**6, unit="y" * 10**6).bound().what) < 300


def test_a_worker_that_names_ever_more_work_is_not_remembered() -> None:
    bars = Bars(console=Console(file=io.StringIO(), force_terminal=True))
    show = TerminalProgress(bars)
    for number in range(1000):
        show(Progress(f"work {number}"))
    assert len(bars.tasks) < 10
    show.close()
    assert bars.tasks == []


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


def test_models_that_come_at_once_share_the_terminal() -> None:
    terminal = Terminal()
    assert TERMINAL.around_lines(b"a line\n") == b"a line\n"
    with show_progress("one", terminal) as first:
        with show_progress("other", terminal) as second:
            first(Progress("downloading", 5 * MIB, 10 * MIB, rate=MIB))
            second(Progress("loading weights", 5, 10, rate=2.5, unit="tensors"))
            assert TERMINAL.around_lines(b"a line\n") == b"\r\x1b[2K\x1b[1A\x1b[2Ka line\n\n"
        first(Progress("downloading", 10 * MIB, 10 * MIB))
        assert TERMINAL.around_lines(b"a line\n") == b"\r\x1b[2Ka line\n"
    assert "downloading" in terminal.getvalue()
    with show_progress("one", terminal):
        pass  # a display begins anew
    assert TERMINAL.around_lines(b"a line\n") == b"a line\n"
