"""What a step does with the KV cache before it computes."""

from __future__ import annotations

from collections.abc import Iterable

from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.runner.step_messages import Pass
from handlers.rolling_batch.schedule.slots import SlotCopy


class StepMemory:
    """Makes the trims and copies of steps in `cache`, or changes its pages.

    `reads_sources`: a chunk reads its prefix where it is, and needs no copy of it yet.
    """

    def __init__(self, cache: KVCache | PagedCache, reads_sources: bool) -> None:
        self._cache = cache
        self._reads_sources = reads_sources
        self._due: list[SlotCopy] = []  # to be made before anything else of the next step

    def arrange(self, step: Pass) -> None:
        """Do what a step has to do before it computes."""
        if not isinstance(self._cache, PagedCache):
            self._arrange_slots(self._cache, step)
        elif step.pages is not None:
            self._cache.apply(step.pages)

    def _arrange_slots(self, cache: KVCache, step: Pass) -> None:
        _copy(cache, self._due)
        for trim in step.trims:
            cache.trim(trim.slot, trim.keep)
        # Copies that no chunk needs yet are made while the first tokens of these sequences are on their way to the
        # clients.
        later = {chunk.slot for chunk in step.chunks if chunk.source != chunk.slot and self._reads_sources}
        self._due = [copy for copy in step.copies if copy.target in later]
        _copy(cache, (copy for copy in step.copies if copy.target not in later))


def _copy(cache: KVCache, copies: Iterable[SlotCopy]) -> None:
    for copy in copies:
        cache.copy(copy.source, copy.target, copy.tokens)
