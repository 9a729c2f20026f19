"""Threads that are all held do not hold up what must not wait for them."""

from __future__ import annotations

import asyncio
import functools
import gzip
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

from frontend.http.compression import decoded_body
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from lmi_server.artifacts.fetch import artifact_settings, fetch_model_directory
from lmi_server.artifacts.own_thread import in_own_thread


async def with_all_threads_held(work: Awaitable[object]) -> object:
    """Await `work` while nothing else gets a thread of asyncio.to_thread."""
    gate = threading.Event()
    held = [asyncio.ensure_future(asyncio.to_thread(gate.wait)) for _ in range(100)]
    try:
        return await asyncio.wait_for(work, 60)
    finally:
        gate.set()
        await asyncio.gather(*held)


def test_a_compressed_body_is_decoded() -> None:
    body = bytes(range(256)) * 4096
    packed = gzip.compress(body, 0)
    held = HeldBytes(MemoryBudget(2 * len(packed), ""))
    held.reserve(len(packed))
    decoding = decoded_body(packed, {"content-encoding": "gzip"}, len(body), held)
    assert asyncio.run(with_all_threads_held(decoding)) == body


def test_a_function_need_not_have_a_name() -> None:
    assert asyncio.run(in_own_thread(functools.partial(max, 1), 2)) == 2


def test_a_model_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    fetching = fetch_model_directory(str(tmp_path / "model"), artifact_settings(str(tmp_path / "cache"), {}))
    assert asyncio.run(with_all_threads_held(fetching)) == tmp_path / "model"


def test_what_is_raised_in_the_thread_is_raised_here() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(in_own_thread(int, "no number"))
