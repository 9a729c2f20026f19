"""The option --cpu-times: how much processor time each module and test costs, whatever else runs on the machine."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

_MAX_EXPENSIVE = 30
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_beside: list[int] = []


def count_beside(pid: int) -> None:
    """Count a process, and those below it, that works for this one and is not below it."""
    _beside.append(pid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        action="store_true",
        help="print the processor time of each module and of the most expensive tests and set-ups of their fixtures",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes())


class CpuTimes:
    """Measures in each process that runs tests, and prints in the one that reports."""

    def __init__(self) -> None:
        self._until_now = 0.0
        self._collection = 0.0
        self._modules: Counter[str] = Counter()
        self._phases: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self._collection += self._since_last()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.cpu_seconds = self._since_last()  # pytest-xdist sends attributes to the process that reports
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = getattr(report, "cpu_seconds", 0.0)
        self._modules[report.nodeid.partition("::")[0]] += seconds
        self._phases[f"{report.when:9}{report.nodeid}"] += seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_collection"] = self._collection

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._collection += getattr(node, "workeroutput", {}).get("cpu_collection", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of processor time")
        total = self._collection + self._modules.total()
        for name, seconds in (("total", total), ("collection", self._collection), *self._modules.most_common()):
            terminalreporter.line(f"{seconds:8.1f} {name}")
        terminalreporter.section("the most expensive tests, set-ups and ends of fixtures")
        for name, seconds in self._phases.most_common(_MAX_EXPENSIVE):
            terminalreporter.line(f"{seconds:8.1f} {name}")

    def _since_last(self) -> float:
        others = (pid for start in (os.getpid(), *_beside) for pid in _descendants(start))
        now = sum(os.times()[:4]) + sum(map(_spent, (*_beside, *others)))
        since, self._until_now = now - self._until_now, now
        return max(0.0, since)  # the time of a process that nobody waited for is gone with it


def _descendants(pid: int) -> Generator[int]:
    """Yield the processes that run below `pid`. os.times() counts them only after their end."""
    with contextlib.suppress(OSError):  # the process has ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in _read(children).split():
                yield int(child)
                yield from _descendants(int(child))


def _spent(pid: int) -> float:
    """Return the seconds of a process and of its ended children; 0 if it is gone."""
    # The name, field 2, is in parentheses and may have spaces. utime, stime, cutime and cstime are fields 14 to 17.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * _TICK_S


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""
