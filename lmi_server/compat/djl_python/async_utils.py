"""What asynchronous handlers answer with: Outputs whose content tells one piece, and whether it is the last."""

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
    """Return a whole answer; `properties` are headers."""
    return _piece(data, True, WHOLE_TYPE, properties, error, code)


def create_stream_chunk_output(
    data: str | dict[str, Any], last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    """Return one line of a streamed answer."""
    return _piece(data, last_chunk, STREAM_TYPE, None, error, code)


async def handle_streaming_response(
    response: AsyncIterator[Any], processor: Callable[..., Any], accumulate_chunks: bool = False, **arguments: Any
) -> AsyncGenerator[Output, None]:
    """Yield an Output for each chunk of `response`.

    `processor(chunk, **arguments)` returns (data, whether it is the last); with `accumulate_chunks` it gets what it
    returned as third value the time before, as `history`. What it raises ends the stream with an error.
    """
    history: list[Any] = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, last, history = processor(chunk, **arguments, history=history)
            else:
                data, last = processor(chunk, **arguments)
        except Exception as error:  # noqa: BLE001 - the border to formatters, which raise anything; the stream tells it
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
