"""What is kept of encoded images: all that running and waiting requests have, and the last ones beside them.

Only the event loop of the worker calls these functions, but features may be dropped in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass

from handlers.rolling_batch.images.encoder import ImageFeatures
from handlers.rolling_batch.images.reader import ImageKey, ReadImage

_COLLECT_S = 2.0


@dataclass(frozen=True, eq=False)
class KnownImage:
    """An encoded image, with what its prompt needs of it; `image` has no pixels."""

    image: ReadImage
    features: ImageFeatures


class FeatureCache:
    """Finds images that were encoded before.

    An image stays as long as a request has it, and then until the images in use and later ones take `limit` bytes.
    `held` counts the bytes of all of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: OrderedDict[ImageKey, KnownImage] = OrderedDict()  # least recently used first
        self._all: weakref.WeakValueDictionary[ImageKey, KnownImage] = weakref.WeakValueDictionary()
        self._taken = 0
        self._dropped: deque[int] = deque()
        self._freed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.encoded = 0
        self.found = 0

    @property
    def held(self) -> int:
        while self._dropped:
            self._taken -= self._dropped.popleft()
        return self._taken

    def find(self, key: ImageKey) -> KnownImage | None:
        """Return an image that is kept; it is the most recently used one then."""
        known = self._all.get(key)
        if known is not None:
            self.found += 1
            self._recent[key] = known
            self._recent.move_to_end(key)
        return known

    def add(self, key: ImageKey, known: KnownImage) -> None:
        """Keep an image that has been encoded."""
        size = known.features.nbytes
        self._taken += size
        weakref.finalize(known.features, self._drop, size).atexit = False
        self._all[key] = self._recent[key] = known
        self.encoded += 1
        del known
        self._evict()

    async def wait_for_room(self, own: int) -> None:
        """Wait until the images take less than the limit, or only a request with `own` bytes has any."""
        while self._evict() > max(self._limit, own):
            self._freed.clear()
            if self.held > max(self._limit, own):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _COLLECT_S)
                    continue
                gc.collect()  # the traceback of a request that failed may hold its images

    def _evict(self) -> int:
        """Drop the least recently used images while there are too many; return how many bytes are held."""
        while self.held > self._limit and self._recent:
            self._recent.popitem(last=False)
        return self.held

    def _drop(self, size: int) -> None:
        self._dropped.append(size)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._freed.set)
