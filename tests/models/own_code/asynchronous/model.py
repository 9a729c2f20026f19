"""An asynchronous handler; the header x-case says what it shows. For tests only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from djl_python import Input, Output
from djl_python.async_utils import create_non_stream_output, create_stream_chunk_output, handle_streaming_response

gate: asyncio.Event


async def handle(inputs: Input) -> Any:
    global gate
    if inputs.is_empty():
        gate = asyncio.Event()
        return None
    match inputs.get_property("x-case"):
        case "wait":
            await gate.wait()
            return Output().add("waited")
        case "open":
            gate.set()
            return Output().add("opened")
        case "whole":
            return create_non_stream_output({"text": "é"}, properties={"x-mine": "1"})
        case "failed":
            return create_non_stream_output("", error="no good", code=422)
        case "raise":
            raise ValueError("not today")
        case "none":
            return None
        case "type":
            return 7
        case "finalize":
            return Output().add("a").finalize(Path(inputs.get_property("x-file")).touch)
    return _stream(inputs)


async def _stream(inputs: Input) -> AsyncIterator[Output]:
    words = inputs.get_as_string().split()
    if inputs.get_property("x-case") == "formatted":
        async for output in handle_streaming_response(_words(words), _format):
            yield output
        return
    for word in words:
        await asyncio.sleep(0)
        if word == "raise":
            raise ValueError("in the stream")
        if word == "failed":
            yield create_stream_chunk_output("", True, error="failed in the stream", code=424)
            return
        if word == "plain":
            yield Output().add("plain ")
            continue
        yield create_stream_chunk_output({"token": word}, word == words[-1])


async def _words(words: list[str]) -> AsyncIterator[str]:
    for word in words:
        yield word


def _format(word: str) -> tuple[str, bool]:
    if word == "raise":
        raise ValueError("in the formatter")
    return f"<{word}>", word == "last"
