"""What the console shows live: one sampler for all pages, which runs only while a page is open.

Once a second it reads the state of every model. A page gets everything first, then only the models that have changed
since its last message: of a thousand idle models nothing is sent. A page that reads too slowly skips messages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from frontend.metrics import Metrics
from frontend.model_metrics import FIRST_TIMES, GAPS
from frontend.server_log import LogTail
from lmi_server.contract.histogram import quantile
from lmi_server.contract.secrets import SECRETS
from lmi_server.contract.sendable import json_bytes
from lmi_server.serving.models import Model

_INTERVAL_S = 0.8  # so that a page shows within a second what has happened, with some time for the way
_AT_ONCE = 50  # models that are read before requests get a turn: a millisecond
_RATE_SAMPLES = 4  # over which rates are taken: workers report once a second, not in step with the sampler
_LATENCY_SAMPLES = round(10 / _INTERVAL_S)
_SHARES = (0.5, 0.95, 0.99)

Row = dict[str, Any]


class _Counts(NamedTuple):
    """The counters of one model, or of all, at one moment."""

    at: float
    tokens: float = 0
    prompt_tokens: float = 0
    cached_tokens: float = 0
    requests: int = 0
    first_token: tuple[int, ...] = ()
    token_gap: tuple[int, ...] = ()


class ConsoleFeed:
    """The events of all pages; `models` returns the models that are registered at the moment."""

    def __init__(self, models: Callable[[], Sequence[Model]], metrics: Metrics, tail: LogTail) -> None:
        self._models = models
        self._metrics = metrics
        self._tail = tail
        self._began = time.time()
        self._pages = 0
        self._closed = False
        self._sampler: asyncio.Task[None] | None = None
        self._sampled = asyncio.Event()
        self._is_fresh = False  # the sampler has read since it was started
        self._number = 0  # of the last sample
        self._listed = 0  # the number of the sample in which a model last came or went
        self._rows: dict[str, tuple[int, Row]] = {}  # by label, with the number of the sample in which it last changed
        self._totals: Row = {}
        self._history: dict[str, deque[_Counts]] = {}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one page, until it is closed."""
        self._open()
        seen = lines = 0
        try:
            if not self._is_fresh:
                await self._sampled.wait()
            while not self._closed:
                tail = self._tail.since(lines)
                lines = tail[-1][0] if tail else lines
                log = await asyncio.to_thread(_masked, tail) if tail else []
                yield b"data: " + json_bytes(self._message(seen, log)) + b"\n\n"
                seen = self._number
                await self._sampled.wait()
        finally:
            self._leave()

    def close(self) -> None:
        """End the events of every page."""
        self._closed = True
        self._sampled.set()

    @property
    def is_sampling(self) -> bool:
        """Return whether the sampler runs."""
        return self._sampler is not None

    def _open(self) -> None:
        self._pages += 1
        if self._sampler is None:
            self._sampler = asyncio.create_task(self._run())

    def _leave(self) -> None:
        self._pages -= 1
        if not self._pages and self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None
            self._is_fresh = False
            self._rows, self._history = {}, {}

    async def _run(self) -> None:
        due = time.monotonic()
        while not self._closed:
            await self._sample()
            self._is_fresh = True
            sampled, self._sampled = self._sampled, asyncio.Event()
            sampled.set()
            now = time.monotonic()
            due = max(due + _INTERVAL_S, now)  # what a late sample has missed is not made up for
            await asyncio.sleep(due - now)

    def _message(self, seen: int, log: Sequence[tuple[int, str]]) -> Row:
        """Return what has changed since sample `seen`, everything if that is 0 or if a model came or went."""
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
        now = time.monotonic()
        rows: dict[str, tuple[int, Row]] = {}
        for count, model in enumerate(self._models(), start=1):
            row = self._row(model, now)
            before = self._rows.get(model.label)
            rows[model.label] = (number, row) if before is None or before[1] != row else before
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
        if rows.keys() != self._rows.keys():
            self._listed = number
            self._history = {label: entry for label, entry in self._history.items() if label in rows}
        self._rows, self._number = rows, number
        self._totals = self._sums()

    def _row(self, model: Model, now: float) -> Row:
        pool = model.pool
        row: Row = {
            "label": model.label,
            "name": model.name,
            "version": model.version,
            "status": model.status.value,
            "reason": "" if model.failure is None else SECRETS.masked(model.failure.message),
            "handler": "" if model.resolved is None else model.resolved.spec.title,
        }
        if pool is None:
            return row
        gauges = _gauges(pool.worker_gauges())
        row |= {
            "workers": pool.worker_states,
            "queue": pool.queued,
            "running": pool.in_flight,
            "adapters": len(pool.adapters.names),
            "kv": _rounded(gauges["kv_cache_usage"] / max(pool.ready_workers, 1))
            if "kv_cache_usage" in gauges
            else None,
        }
        counts = self._counts(model, gauges, now)
        history = self._history.setdefault(model.label, deque(maxlen=_LATENCY_SAMPLES + 1))
        history.append(counts)
        if counts.requests or counts.tokens:
            row |= self._measured(history)
        return row

    def _counts(self, model: Model, gauges: Mapping[str, float], now: float) -> _Counts:
        """Return the counters of a model. Those before its first request are needed to show this one."""
        series = self._metrics.counted(model)
        if series is None:
            return _Counts(now, gauges.get("generated_tokens", 0.0))
        series.settle()
        adapters = series.adapters.values()
        # An engine that counts its tokens does so while it generates them, the front end when a request has ended.
        return _Counts(
            now,
            gauges.get("generated_tokens", sum(each.output_tokens for each in adapters)),
            sum(each.prompt_tokens for each in adapters),
            sum(each.cached_tokens for each in adapters),
            sum(series.by_code.values()),
            tuple(series.first_token.counts),
            tuple(series.token_gap.counts),
        )

    def _measured(self, history: Sequence[_Counts]) -> Row:
        """Return rates over the last seconds, and percentiles of the requests that ended in the last ten."""
        last, first, recent = history[-1], history[0], history[max(0, len(history) - 1 - _RATE_SAMPLES)]
        seconds = last.at - recent.at
        prompts = last.prompt_tokens - first.prompt_tokens
        return {
            "tokens": _rounded(max(0.0, last.tokens - recent.tokens) / seconds) if seconds else 0,
            "requests": _rounded(max(0, last.requests - recent.requests) / seconds) if seconds else 0,
            "hits": _rounded((last.cached_tokens - first.cached_tokens) / prompts) if prompts > 0 else None,
            "ttft": _percentiles(FIRST_TIMES, first.first_token, last.first_token),
            "itl": _percentiles(GAPS, first.token_gap, last.token_gap),
        }

    def _sums(self) -> Row:
        """Return the row of all models together."""
        rows = [row for _, row in self._rows.values()]
        loaded = [row for row in rows if "queue" in row]
        used = [row["kv"] for row in loaded if row["kv"] is not None]
        sums: Row = {name: sum(row[name] for row in loaded) for name in ("queue", "running")}
        sums |= {name: _rounded(sum(row.get(name, 0) for row in loaded)) for name in ("tokens", "requests")}
        sums |= {"kv": max(used, default=None), "hits": None, "ttft": None, "itl": None}
        histories = list(self._history.values())
        if histories:
            firsts, lasts = [history[0] for history in histories], [history[-1] for history in histories]
            prompts = sum(last.prompt_tokens - first.prompt_tokens for first, last in zip(firsts, lasts, strict=True))
            cached = sum(last.cached_tokens - first.cached_tokens for first, last in zip(firsts, lasts, strict=True))
            sums |= {
                "hits": _rounded(cached / prompts) if prompts > 0 else None,
                "ttft": _percentiles(FIRST_TIMES, _added(firsts, "first_token"), _added(lasts, "first_token")),
                "itl": _percentiles(GAPS, _added(firsts, "token_gap"), _added(lasts, "token_gap")),
            }
        return sums


def _masked(tail: Sequence[tuple[int, str]]) -> Sequence[tuple[int, str]]:
    """Return lines without secrets: the log hides those that it knows when it writes a line; others become known later.

    The first lines of a page are up to two megabytes, which is why this is for a thread.
    """
    return [(number, SECRETS.masked(line)) for number, line in tail]


def _gauges(by_worker: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the gauges of a model's handlers, summed over its workers."""
    total: dict[str, float] = {}
    for gauges in by_worker.values():
        for name, value in gauges.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _percentiles(bounds: Sequence[float], before: Sequence[int], after: Sequence[int]) -> list[float] | None:
    """Return the 50th, 95th and 99th percentile in milliseconds of what was counted between; None if nothing was."""
    changes = [now - then for now, then in zip(after, before or [0] * len(after), strict=True)]
    if not any(changes):
        return None
    return [_rounded((quantile(bounds, changes, share) or 0.0) * 1000) for share in _SHARES]


def _added(counts: Sequence[_Counts], name: str) -> list[int]:
    return [
        sum(column) for column in zip(*(getattr(each, name) for each in counts if getattr(each, name)), strict=True)
    ]


def _rounded(value: float) -> float:
    return round(value, 3)
