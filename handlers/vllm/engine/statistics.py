"""The engine's statistics: gauges for /metrics, and a line in the log while it decodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from handlers.vllm import library

logger = logging.getLogger("handlers.vllm.handler")

_LINE_INTERVAL_S = 5.0
_IDLE_S = 1.0  # without a step for so long the engine was idle; the longest steps, of long prompts, take less


class Statistics:
    """Gauges as of the engine's last step. vLLM records its own statistics into what `logger_factory` returns."""

    def __init__(self) -> None:
        self._kv_tokens = 0
        self._running = 0
        self._waiting = 0
        self._usage = 0.0
        self._generated = 0
        self._prompt_tokens = 0
        self._line_at = self._recorded_at = time.monotonic()
        self._generated_at_line = 0
        self._rate = 0.0

    def logger_factory(self, config: Any, index: int = 0) -> library.StatLoggerBase:
        """Return the statistics logger for one engine; vLLM calls this with its own arguments."""
        return _Recorder(self)

    def set_capacity(self, kv_tokens: int) -> None:
        """Set the number of tokens that the KV cache holds."""
        self._kv_tokens = kv_tokens

    def gauges(self, unfinished: int) -> Mapping[str, float]:
        """Return the gauges by name.

        vLLM records nothing while it is idle, so what it recorded last would stay: without `unfinished` requests the
        gauges of the present state are zero.
        """
        busy = unfinished > 0
        return {
            "running_requests": self._running * busy,
            "waiting_requests": self._waiting * busy,
            "kv_cache_used_tokens": round(self._usage * self._kv_tokens) * busy,
            "kv_cache_usage": self._usage * busy,
            "generated_tokens_total": self._generated,
            "prompt_tokens_total": self._prompt_tokens,
            "generation_throughput": self._rate * busy,
        }

    def exposition(self) -> bytes:
        """Return vLLM's own metrics in Prometheus' text format."""
        return library.own_metrics()

    def record(self, scheduler: Any | None, iteration: Any | None) -> None:
        """Take vLLM's statistics of one step: of its scheduler, and of its outputs."""
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._usage = scheduler.kv_cache_usage
        if iteration is not None:
            self._generated += iteration.num_generation_tokens
            self._prompt_tokens += iteration.num_prompt_tokens
        now = time.monotonic()
        if now - self._recorded_at > _IDLE_S:  # idle time does not count for the throughput
            self._line_at, self._generated_at_line = now, self._generated
        self._recorded_at = now
        if now - self._line_at >= _LINE_INTERVAL_S:
            self._write_line(now)

    def _write_line(self, now: float) -> None:
        self._rate = (self._generated - self._generated_at_line) / (now - self._line_at)
        self._line_at, self._generated_at_line = now, self._generated
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f,"
            " gen throughput (token/s): %.2f, #queue-req: %d",
            self._running,
            round(self._usage * self._kv_tokens),
            self._usage,
            self._rate,
            self._waiting,
        )


class _Recorder(library.StatLoggerBase):
    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        self._statistics.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        return
