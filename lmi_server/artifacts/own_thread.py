"""Work in a thread of its own, for what may take any time: a download, or a file that is no file.

The threads of `asyncio.to_thread` are few and shared. A call that holds one for long makes all others wait.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


async def in_own_thread(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result:
    """Return the result of `function`, or raise its exception."""
    thread = ThreadPoolExecutor(1, getattr(function, "__name__", "own-thread"))  # a partial has no name
    try:
        call = functools.partial(function, *arguments, **keywords)
        return await asyncio.get_running_loop().run_in_executor(thread, call)
    finally:
        thread.shutdown(wait=False)
