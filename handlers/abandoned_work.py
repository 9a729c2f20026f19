"""Work of requests in threads, which goes on when their client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Return what `work` results in. If the caller is cancelled, it waits for the end of the work before it raises.

    What a thread has been given takes memory until then. So a caller that holds a turn keeps it, and clients that come
    and leave do not queue work without end.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.cancelled() or task.exception()  # which nothing else looks at
        raise
    finally:
        del task  # the traceback of its error has this frame
