"""What every request dialect gives the worker: an `Exchange`, made by one `parse` function per dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, Feature, GenerationRequest
from lmi_server.contract.protocol import Input


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect may know about the model: its names, formatting options, and what its handler told of it."""

    name: str
    served_names: tuple[str, ...] = ()
    output_formatter: str | None = None  # option.output_formatter
    tgi_compat: bool = False  # option.tgi_compat
    adapters: frozenset[str] = frozenset()  # names of the LoRA adapters that the handler was given
    features: frozenset[Feature] = frozenset()
    sampling_defaults: Mapping[str, Any] = {}
    max_model_len: int = 0  # tokens


class Formatting(ABC):
    """What stands in the place of the dialects: code that a model, or an adapter, brings along."""

    @abstractmethod
    def parse(self, request: Input, served: ServedModel) -> Exchange:
        """Parse a request. Raises RequestError where it cannot be served, HandlerError where the code raised."""


class Exchange(ABC):
    """One HTTP request, parsed: the sequences to generate and the way to write the answer.

    The worker calls `add` with each delta of each sequence, in order within a sequence. Streaming: it sends what
    `first`, then each `add`, then `last` return. Not streaming: it ignores those and sends `body()` at the end.
    An answer that ends in an error calls `error_chunk` in place of `last`. `warnings` tell what the request asked for
    and does not get (unknown parameters, ...); the worker logs them.
    """

    requests: tuple[GenerationRequest, ...]
    stream: bool
    content_type: str
    warnings: tuple[str, ...] = ()

    def first(self) -> bytes:
        """Return what a stream starts with, before any delta."""
        return b""

    @abstractmethod
    def add(self, index: int, delta: Delta) -> bytes:
        """Take the next delta of `requests[index]`; return the bytes that a stream sends for it (may be empty)."""

    def last(self) -> bytes:
        """Return what ends a stream, once every sequence has its finish reason."""
        return b""

    def body(self) -> bytes:
        """Return the whole answer, once every sequence has its finish reason. A stream has none."""
        raise NotImplementedError(f"{type(self).__name__} streams its answer")

    @abstractmethod
    def error_chunk(self, error: LmiServerError) -> bytes:
        """Return the last bytes of a stream that fails after it began."""
