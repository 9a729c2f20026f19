"""The load of the benchmarks: the load generator of `lmi-server bench` with bodies that a benchmark writes itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_server.bench.arrivals import ClosedLoop
from lmi_server.bench.client import Target
from lmi_server.bench.dialects import Dialect, Usage, dialect_of
from lmi_server.bench.records import Record
from lmi_server.bench.run import Run, RunLength
from lmi_server.bench.workload import Prompt

LIMIT_S = 600.0
COMPLETIONS, CHAT, LMI = "completions", "chat", "lmi"


@dataclass(frozen=True, slots=True)
class _Body(Prompt):
    """A request that is written already."""

    fields: Mapping[str, Any] = field(default_factory=dict)


class _Bodies:
    """An API whose requests are written already; `path` takes the place of its own."""

    def __init__(self, api: Dialect, path: str | None) -> None:
        self.path = path or api.path
        self.count = api.count
        self.text = api.text
        self._api = api

    def body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        assert isinstance(prompt, _Body)
        return dict(prompt.fields)

    def usage(self, answer: bytes, stream: bool) -> Usage:
        return self._api.usage(answer, stream)


def completion(model: str, prompt: str | list[int], tokens: int, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return the body of a greedy completion of exactly `tokens` tokens, with further fields."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


async def run_load(
    port: int,
    bodies: Sequence[Mapping[str, Any]],
    connections: int,
    tokens: int | None = None,
    api: str = COMPLETIONS,
    path: str | None = None,
) -> tuple[float, list[Record]]:
    """Send all bodies over `connections` connections; return the seconds that this took, and the records.

    Raises AssertionError if a request fails, or has not `tokens` tokens if they are given.
    """
    stream = bool(bodies[0].get("stream"))
    dialect = _Bodies(dialect_of(api, stream), path)
    target = Target("127.0.0.1", port, "", None, (), "", dialect, stream)
    prompts = (_Body("", fields=body) for body in bodies)
    records = await Run(target, ClosedLoop(connections), prompts, RunLength(len(bodies), None, LIMIT_S)).run(0)
    for record in records:
        assert record.error is None, record.error
        assert tokens in (None, record.output_tokens), f"{record.output_tokens} tokens of {tokens} came"
    return max(record.end for record in records) - min(record.due for record in records), records


def tokens_per_second(port: int, bodies: Sequence[Mapping[str, Any]], connections: int, tokens: int) -> float:
    """Return the rate of requests for `tokens` tokens each."""
    seconds, _ = asyncio.run(run_load(port, bodies, connections, tokens))
    return len(bodies) * tokens / seconds


def in_turns(pairs: int, one: Callable[[], float], other: Callable[[], float]) -> list[tuple[float, float]]:
    """Return what both give in each pair of turns. The one that comes first changes; a pair before warms up."""
    found = []
    for number in range(-1, pairs):
        if number % 2:
            second = other()
            found.append((one(), second))
        else:
            found.append((one(), other()))
    return found[1:]
