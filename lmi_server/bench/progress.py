"""How far a run of `lmi-server bench` is, while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lmi_server.bench.run import Run, RunLength

_LINE_EVERY_S = 5.0

Show = Callable[[str, RunLength], Callable[[Run], None]]


@contextmanager
def show_progress(console: Console) -> Iterator[Show]:
    """Yield what shows how far a run is: in a table on a terminal, elsewhere in a line every five seconds."""
    if not console.is_terminal:
        yield _ProgressLines
        return
    with Live(console=console, transient=True) as live:
        yield lambda title, length: lambda run: live.update(_table(title, run, length))


class _ProgressLines:
    """Prints lines on the standard error, so that the output has the figures alone."""

    def __init__(self, title: str, length: RunLength) -> None:
        self._title = title
        self._length = length
        self._next_s = _LINE_EVERY_S

    def __call__(self, run: Run) -> None:
        seconds = time.perf_counter() - run.started
        if seconds >= self._next_s:
            self._next_s = seconds + _LINE_EVERY_S
            figures = ", ".join(f"{name} {text}" for name, text in _figures(run, self._length).items())
            typer.echo(f"{self._title}: {figures}", err=True)


def _table(title: str, run: Run, length: RunLength) -> Table:
    table = Table(title=title)
    figures = _figures(run, length)
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*figures.values())
    return table


def _figures(run: Run, length: RunLength) -> Mapping[str, str]:
    seconds = time.perf_counter() - run.started
    ended = len(run.records)
    return {
        "done": f"{100 * _share(run.ended_chats, seconds, length):.0f} %",
        "running": str(run.running),
        "ended": str(ended),
        "failed": str(ended - run.completed),
        "requests/s": f"{run.completed / seconds:.1f}",
        "output tokens/s": f"{run.output_tokens / seconds:.0f}",
    }


def _share(chats: int, seconds: float, length: RunLength) -> float:
    """Return how much of a run is done, by the nearer limit. A single request is a chat of one turn."""
    by_requests = chats / length.requests if length.requests else 0.0
    by_time = seconds / length.duration_s if length.duration_s else 0.0
    return min(1.0, max(by_requests, by_time))
