"""The load of the benchmarks: the load generator of `lmi-server bench` with bodies that a benchmark writes itself."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_server.bench.arrivals import Arrivals, ClosedLoop
from lmi_server.bench.client import Target
from lmi_server.bench.dialects import Dialect, Usage, dialect_of
from lmi_server.bench.records import Record
from lmi_server.bench.run import Run, RunLength
from lmi_server.bench.workload import Prompt

LIMIT_S = 600.0
COMPLETIONS, CHAT, LMI = "completions", "chat", "lmi"
TEXT = "text"
"""Where the usage of a record has a checksum of the text, if texts are read."""


@dataclass(frozen=True, slots=True)
class _Body(Prompt):
    """A request that is written already."""

    fields: Mapping[str, Any] = field(default_factory=dict)


class _Bodies:
    """An API whose requests are written already; `path` takes the place of its own."""

    def __init__(self, api: Dialect, path: str | None, reads_texts: bool) -> None:
        self.path = path or api.path
        self.count = api.count
        self.text = api.text
        self._api = api
        self._reads_texts = reads_texts

    def body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        assert isinstance(prompt, _Body)
        return dict(prompt.fields)

    def usage(self, answer: bytes, stream: bool) -> Usage:
        usage = self._api.usage(answer, stream)
        return {**usage, TEXT: zlib.crc32(self.text(answer, stream).encode())} if self._reads_texts else usage


def completion(model: str, prompt: str | list[int], tokens: int, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return the body of a greedy completion of exactly `tokens` tokens, with further fields."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


async def send(
    port: int,
    bodies: Iterable[Mapping[str, Any]],
    arrivals: Arrivals,
    seconds: float | None = None,
    api: str = COMPLETIONS,
    path: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    reads_texts: bool = False,
) -> list[Record]:
    """Send the bodies, streamed or whole as the first one is, within `seconds`; return their records in order."""
    prompts = [_Body("", fields=body) for body in bodies]
    stream = bool(prompts[0].fields.get("stream"))
    dialect = _Bodies(dialect_of(api, stream), path, reads_texts)
    target = Target("127.0.0.1", port, "", None, headers, "", dialect, stream)
    records = await Run(target, arrivals, iter(prompts), RunLength(len(prompts), seconds, LIMIT_S)).run(0)
    return sorted(records, key=lambda record: record.due)


async def run_load(
    port: int,
    bodies: Sequence[Mapping[str, Any]],
    connections: int,
    tokens: int | None = None,
    api: str = COMPLETIONS,
    **more: Any,
) -> tuple[float, list[Record]]:
    """Send all bodies over `connections` connections; return the seconds that this took, and what `send` returns.

    Raises AssertionError if a request fails, or has not `tokens` tokens if they are given.
    """
    records = await send(port, bodies, ClosedLoop(connections), api=api, **more)
    for record in records:
        assert record.error is None, record.error
        assert tokens in (None, record.output_tokens), f"{record.output_tokens} tokens of {tokens} came"
    return max(record.end for record in records) - records[0].due, records


def tokens_per_second(port: int, bodies: Sequence[Mapping[str, Any]], connections: int, tokens: int) -> float:
    """Return the rate of requests for `tokens` tokens each."""
    seconds, _ = asyncio.run(run_load(port, bodies, connections, tokens))
    return len(bodies) * tokens / seconds


def tokens_within(records: Sequence[Record], begin: float, end: float) -> int:
    """Return how many tokens came from `begin` to `end`, which are seconds behind the first request."""
    times = (itertools.accumulate((record.first, *record.gaps)) for record in records if record.first is not None)
    start = records[0].due
    return sum(begin <= at - start < end for at in itertools.chain.from_iterable(times))
