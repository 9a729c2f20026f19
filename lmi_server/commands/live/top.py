"""`lmi-server top`: the work of a server's models, as a table that is drawn anew once a second."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Annotated

import typer
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmi_server.client.numbers import seconds
from lmi_server.client.server_calls import DEFAULT_URL, Headers, ServerCalls, parse_headers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.commands.live.model_figures import ModelFigures, Snapshot, figures, take_snapshot
from lmi_server.contract.errors import ConfigurationError

_WINDOW_S = 60.0  # of percentiles and of the cache
_COLUMNS = (
    *("model", "state", "workers", "running", "queue", "tokens/s", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95"),
    *("KV cache", "prefix hits", "memory"),
)
_LEFT = ("model", "state", "workers")
_WIDE = ("TTFT p95", "ITL p95", "prefix hits", "memory")  # columns that a narrow terminal has no room for
_WIDE_FROM = 130
_OTHER_LINES = 6  # of the screen: the title, the head of the table and the last line
_STYLES = {"READY": "green", "PENDING": "yellow", "FAILED": "red"}
_NONE = "-"
_PLAIN_WIDTH = 200  # of the table without a terminal; what reads it may cut lines, and must not lose figures


def top(
    url: Annotated[str, typer.Argument(help="The server.")] = DEFAULT_URL,
    interval: Annotated[float, seconds("--interval", "Seconds between two looks.", 0.1, 3600)] = 1.0,
    header: Headers = None,
) -> None:
    """Show what the models of a running server do, until q or Ctrl-C; without a terminal, print one table."""
    with plain_configuration_errors():
        server = ServerCalls(url, dict(parse_headers(header or ())))
        first = take_snapshot(server)
        if sys.stdout.isatty():
            with contextlib.suppress(KeyboardInterrupt):
                _watch(server, first, interval)
        else:
            time.sleep(interval)
            Console(width=_PLAIN_WIDTH).print(_table(figures(take_snapshot(server), first, None), _PLAIN_WIDTH))


def _watch(server: ServerCalls, first: Snapshot, interval: float) -> None:
    """Draw the table until q is typed, also while the server does not answer."""
    console = Console()
    snapshots = deque([first])
    trouble = ""
    with _keys_one_by_one(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(server.url, snapshots, trouble, console.size), refresh=True)
            if _is_typed(b"q", interval):
                return
            try:
                snapshots.append(take_snapshot(server))
                trouble = ""
            except ConfigurationError as error:
                trouble = error.message
            while len(snapshots) > 2 and snapshots[1].at <= snapshots[-1].at - _WINDOW_S:
                snapshots.popleft()


def _screen(url: str, snapshots: Sequence[Snapshot], trouble: str, size: ConsoleDimensions) -> RenderableType:
    now, before = snapshots[-1], snapshots[-2] if len(snapshots) > 1 else None
    found = figures(now, before, snapshots[0] if len(snapshots) > 1 else None)
    shown = found[: max(1, size.height - _OTHER_LINES)]
    since = f"percentiles of the last {now.at - snapshots[0].at:.0f} s" if before else "percentiles since the start"
    rest = f"; {len(found) - len(shown)} more models" if len(found) > len(shown) else ""
    title = Text(f"{url}  {time.strftime('%H:%M:%S')}  {len(found)} models, {since}", style="bold")
    last = Text(trouble, style="red") if trouble else Text(f"q ends{rest}", style="dim")
    return Group(title, _table(shown, size.width), last)


def _table(found: Sequence[ModelFigures], width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    shown = [width >= _WIDE_FROM or name not in _WIDE for name in _COLUMNS]
    for name in compress(_COLUMNS, shown):
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for each in found:
        table.add_row(*compress(_row(each), shown))
    return table


def _row(found: ModelFigures) -> Iterator[Text]:
    yield Text(found.label)
    yield Text(found.state, style=_STYLES.get(found.state, ""))
    yield Text(_workers(found))
    yield from (Text(f"{count:.0f}") for count in (found.running, found.queued))
    yield Text(_NONE if found.tokens_per_s is None else f"{found.tokens_per_s:.1f}")
    yield from (Text(_milliseconds(seconds)) for seconds in (*found.first_token_s, *found.token_gap_s))
    yield from (Text(_NONE if share is None else f"{share:.1%}") for share in (found.kv_usage, found.prefix_hits))
    yield Text(_NONE if found.memory_bytes is None else f"{found.memory_bytes / 2**30:.1f} GiB")


def _workers(found: ModelFigures) -> str:
    """Return how many workers are ready, and how many are in another state."""
    others = [f"{count} {state}" for state, count in found.workers.items() if count and state != "ready"]
    return ", ".join([str(found.workers.get("ready", 0)), *others])


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _is_typed(key: bytes, limit_s: float) -> bool:
    """Return whether `key` is typed within `limit_s` seconds; other keys are skipped."""
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left_s)
        elif select.select([sys.stdin], [], [], left_s)[0] and os.read(sys.stdin.fileno(), 1) == key:
            return True
    return False


@contextlib.contextmanager
def _keys_one_by_one() -> Iterator[None]:
    """Have the terminal give out each key as it is typed, and not show it."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
