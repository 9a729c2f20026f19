"""What the console shows live: one sampler for all pages, which also keeps the last hour for the next page.

While a page is open it reads the state of every model every 0.8 seconds, otherwise every four. A page gets everything
first, then only the models that have changed since its last message: of a thousand idle models nothing is sent. A page
that reads too slowly skips messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from importlib.metadata import version

from frontend.console.figures import Row, Window, counts_of, round_number, sums
from frontend.console.history import COLUMNS, HOUR_S, SPAN_S, History
from frontend.management.models import LONGEST_WORK
from frontend.observability.metrics.collector import Metrics
from frontend.observability.server_log import LogTail
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.contract.texts.sendable import json_bytes
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool.engine_metrics import summed_gauges

_INTERVAL_S = 0.8  # so that a page shows within a second what has happened, with some time for the way
_QUIET_INTERVAL_S = 4.0  # without a page
_AT_ONCE = 50  # models that are read before requests get a turn: a millisecond


class ConsoleFeed:
    """The events of all pages, while `run` runs; `models` returns the models that are registered at the moment."""

    def __init__(self, models: Callable[[], Sequence[Model]], metrics: Metrics, tail: LogTail) -> None:
        self._models = models
        self._metrics = metrics
        self._tail = tail
        self._began = time.time()
        self._pages = 0
        self._closed = False
        self._opened = asyncio.Event()  # the first page, for which the sampler hurries
        self._sampled = asyncio.Event()
        self._number = 0  # of the last sample
        self._listed = 0  # the number of the sample in which a model last came or went
        self._rows: dict[str, tuple[int, Row]] = {}  # by label, with the number of the sample in which it last changed
        self._totals: Row = {}
        self._windows: dict[str, Window] = {}
        self._history = History()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one page, until it is closed."""
        self._pages += 1
        seen = lines = 0
        try:
            await self._until_fresh()
            while not self._closed:
                tail = self._tail.since(lines)
                lines = tail[-1][0] if tail else lines
                log = await asyncio.to_thread(_mask, tail) if tail else []
                yield b"data: " + json_bytes(self._message(seen, log)) + b"\n\n"
                seen = self._number
                await self._sampled.wait()
        finally:
            self._pages -= 1

    async def _until_fresh(self) -> None:
        """Wait until a sample is as new as pages show them; the first page has the sampler hurry."""
        if self._pages == 1:
            self._opened.set()
        if not self._closed and (self._pages == 1 or not self._number):
            await self._sampled.wait()

    def history(self, label: str, hour: bool) -> bytes:
        """Return the last five minutes of a model, or of all under "", in JSON; `time` is that of time.time().

        Of the last hour there are steps of ten seconds.
        """
        span_s = HOUR_S if hour else SPAN_S
        points = self._history.points(label, time.time() - span_s, span_s)
        return json_bytes({"columns": COLUMNS, "points": points})

    def close(self) -> None:
        """End the events of every page."""
        self._closed = True
        self._sampled.set()

    async def run(self) -> None:
        """Sample until the feed is closed."""
        while not self._closed:
            began = time.monotonic()
            await self._sample()
            sampled, self._sampled = self._sampled, asyncio.Event()
            sampled.set()
            interval = _INTERVAL_S if self._pages else _QUIET_INTERVAL_S
            self._opened.clear()
            with contextlib.suppress(TimeoutError):
                # What a late sample has missed is not made up for.
                await asyncio.wait_for(self._opened.wait(), max(0.0, began + interval - time.monotonic()))
        self._sampled.set()  # for pages that wait for a sample after the last one

    def _message(self, seen: int, log: Sequence[tuple[int, str]]) -> Row:
        """Return the changes since sample `seen`, everything if that is 0 or if a model came or went."""
        whole = seen < self._listed
        return {
            "server": {"version": version("lmi-server"), "since": self._began},
            "time": time.time(),
            "whole": whole,
            "models": [row for changed, row in self._rows.values() if whole or changed > seen],
            "totals": self._totals,
            "log": log,
        }

    async def _sample(self) -> None:
        """Read every model. A page that opens meanwhile gets the sample before."""
        number = self._number + 1
        now, at = time.monotonic(), time.time()
        rows: dict[str, tuple[int, Row]] = {}
        for count, model in enumerate(self._models(), start=1):
            row = self._row(model, now)
            before = self._rows.get(model.label)
            rows[model.label] = (number, row) if before is None or before[1] != row else before
            self._history.add(model.label, at, row)
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
        if rows.keys() != self._rows.keys():
            self._listed = number
            self._windows = {label: window for label, window in self._windows.items() if label in rows}
            self._history.keep(rows)
        self._rows, self._number = rows, number
        self._totals = sums([row for _, row in rows.values()], self._windows.values())
        self._history.add("", at, self._totals)

    def _row(self, model: Model, now: float) -> Row:
        pool = model.pool
        row = _state(model)
        gauges = {} if pool is None else summed_gauges(pool.roster.gauges)
        window = self._windows.setdefault(model.label, Window())
        window.add(counts_of(self._metrics.find(model), gauges, now))
        if pool is None:
            return row
        used = gauges.get("kv_cache_usage")
        row |= {
            "workers": pool.roster.states,
            "queue": pool.dispatcher.queued,
            "running": pool.dispatcher.in_flight,
            "adapters": len(pool.adapters.names),
            "kv": None if used is None else round_number(used / max(len(pool.roster.ready), 1)),
        }
        if window.last.requests or window.last.tokens:
            row |= window.measure()
        return row


def _state(model: Model) -> Row:
    """Return the name and the state of a model, before it has workers too."""
    return {
        "label": model.label,
        "name": model.name,
        "version": model.version,
        "status": model.status.value,
        "reason": "" if model.failure is None else SECRETS.mask(model.failure.message),
        "handler": "" if model.resolved is None else model.resolved.spec.title,
        "loading": _loading(model),
        "reloading": model.is_reloading,
        "trying": model.trial is not None,
    }


def _mask(tail: Sequence[tuple[int, str]]) -> Sequence[tuple[int, str]]:
    """Return lines without secrets: the log hides the secrets that it knows when it writes a line; others become known
    later.

    The first lines of a page are up to two megabytes, which is why this is for a thread.
    """
    return [(number, SECRETS.mask(line)) for number, line in tail]


def _loading(model: Model) -> Row | None:
    """Return since when a model, its next version or a worker of it loads, and how far that is; None if none does."""
    load = model.loading
    if load is None:
        return None
    progress = load.progress
    return {
        "since": load.began_at,
        "what": excerpt(SECRETS.mask(progress.what), LONGEST_WORK),
        "unit": progress.unit,
        "done": progress.done,
        "total": progress.total,
        "rate": None if progress.rate is None else round_number(progress.rate),
        "left": None if progress.left_s is None else round_number(progress.left_s),
    }
