"""The engine's statistics: gauges for /metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from lmi_server.contract.errors import describe

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_TIMEOUT_S = 2.0  # without an iteration for so long the engine is idle

Read = Callable[[float], AsyncIterator[Mapping[str, Any]]]


class Statistics:
    """Gauges as of the engine's last iteration, and counts of tokens that the handler makes itself."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._reader: asyncio.Task[None] | None = None
        self._stopped = False
        self.running = 0
        self.generated_tokens = 0
        self.prompt_tokens = 0

    def start(self, read: Read) -> None:
        """Read the engine's statistics from now on. `read` yields them until none comes for some seconds."""
        self._reader = asyncio.create_task(self._follow(read))

    def stop(self) -> None:
        self._stopped = True  # the cancellation alone may be lost: asyncio.wait_for returns what came at the same time
        if self._reader is not None:
            self._reader.cancel()

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges by name. An idle engine reports nothing, so what it reported last would stay."""
        busy = self.running > 0
        cache: Mapping[str, Any] = self._last.get("kvCacheStats") or {}
        blocks, used = cache.get("maxNumBlocks", 0), cache.get("usedNumBlocks", 0) * busy
        return {
            "running_requests": min(self.running, self._last.get("numActiveRequests", self.running)),
            "waiting_requests": self._last.get("numQueuedRequests", 0) * busy,
            "kv_cache_used_tokens": used * cache.get("tokensPerBlock", 0),
            "kv_cache_usage": used / blocks if blocks else 0.0,
            "kv_cache_free_blocks": blocks - used,
            "kv_cache_reused_blocks_total": cache.get("reusedBlocks", 0),
            "kv_cache_hit_rate": cache.get("cacheHitRate", 0.0),
            "generated_tokens_total": self.generated_tokens,
            "prompt_tokens_total": self.prompt_tokens,
        }

    async def _follow(self, read: Read) -> None:
        while not self._stopped:
            if self.running:
                try:
                    async for values in read(_TIMEOUT_S):
                        self._last = values
                        if self._stopped:
                            return
                # The border to TensorRT-LLM: requests do not need its statistics.
                except Exception as error:  # noqa: BLE001
                    logger.warning("TensorRT-LLM reports no statistics, so /metrics lacks them: %s", describe(error))
                    return
            await asyncio.sleep(_PAUSE_S)
