"""Outputs of asynchronous handlers: each carries one piece of an answer, and whether it is the last one."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from djl_python.outputs import Output

STREAM_TYPE = "application/jsonlines"
WHOLE_TYPE = "application/json"
_FAILED = 424


def create_non_stream_output(
    data: str | dict[str, Any],
    properties: Mapping[str, str] | None = None,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """Return a whole answer. `properties` become headers; with `error` or a `code` of 300 or more it is a failure."""
    return _piece(data, True, WHOLE_TYPE, properties, error, code)


def create_stream_chunk_output(
    data: str | dict[str, Any], last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    """Return one line of a streamed answer. With `error` the stream ends with it."""
    return _piece(data, last_chunk, STREAM_TYPE, None, error, code)


async def handle_streaming_response(
    response: AsyncIterator[Any],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **kwargs: Any,
) -> AsyncGenerator[Output, None]:
    """Yield an Output for each chunk of `response`.

    `stream_output_formatter(chunk, **kwargs)` returns the data and whether it is the last. With `accumulate_chunks` it
    returns a third value, which the next call gets as `history`. An exception in it ends the stream with an error.
    """
    history: list[Any] = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, last, history = stream_output_formatter(chunk, **kwargs, history=history)
            else:
                data, last = stream_output_formatter(chunk, **kwargs)
        except Exception as error:  # noqa: BLE001 - the border to formatters, which raise anything; the stream reports it
            yield create_stream_chunk_output("", True, error=str(error), code=_FAILED)
            return
        yield create_stream_chunk_output(data, last)
        if last:
            return


def _piece(
    data: str | dict[str, Any],
    last: bool,
    content_type: str,
    properties: Mapping[str, str] | None,
    error: str | None,
    code: int | None,
) -> Output:
    text = json.dumps(data, ensure_ascii=False) if isinstance(data, dict) else data
    fields: dict[str, Any] = {"data": text + "\n", "last": last}
    if error is not None:
        fields["error"] = error
    if code is not None:
        fields["code"] = code
    output = Output()
    output.add_property("Content-Type", content_type)
    for name, value in (properties or {}).items():
        output.add_property(name, value)
    output.add(bytes(Output.binary_encode(fields)))
    return output
