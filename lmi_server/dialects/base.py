"""The interfaces between the dialects and the worker: `Exchange`, the result of parsing, and the knowledge that parsing
may use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, Feature, GenerationRequest
from lmi_server.contract.protocol import Input
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.routes import INVOCATIONS


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect may know about the model: its names, its formatting options, and what its handler reports."""

    name: str
    served_names: tuple[str, ...] = ()
    output_formatter: str | None = None  # option.output_formatter
    tgi_compat: bool = False  # option.tgi_compat
    async_service: bool = False  # option.async_mode: answers have the shape of LMI's asynchronous service
    samples: bool = False  # option.decoding_strategy=sample: what LMI's requests do that do not say it
    adapters: Collection[str] = frozenset()  # names of the LoRA adapters that requests may use
    features: frozenset[Feature] = frozenset()
    sampling_defaults: Mapping[str, Any] = {}
    max_model_len: int = 0  # tokens


class Formatting(ABC):
    """Code of a model or an adapter that parses requests and writes answers instead of the dialects."""

    @abstractmethod
    def parse(self, request: Input, served: ServedModel) -> Exchange:
        """Parse a request. Raises RequestError if it cannot be served, HandlerError if the code raises."""


class Exchange(ABC):
    """One parsed HTTP request: the sequences to generate, and the way to write the answer.

    The worker calls `add` with each delta of each sequence, in order within a sequence. If `stream` is true, it sends
    what `first`, then each `add`, then `last` return. Otherwise it ignores these bytes and sends `body()` at the end.
    If the answer ends in an error, it calls `error_chunk` instead of `last`. `warnings` are lines for the log: what the
    request asks for and does not get, such as unknown parameters. `headers` are further headers of a whole
    answer; they are read after `body()`. `error_route` is a route whose errors have the form of this answer.
    """

    error_route = INVOCATIONS

    requests: tuple[GenerationRequest, ...]
    stream: bool = False
    content_type: str = "application/json"
    warnings: tuple[str, ...] = ()
    headers: Sequence[tuple[str, str]] = ()

    def first(self) -> bytes:
        """Return the bytes that a stream starts with, before any delta."""
        return b""

    @abstractmethod
    def add(self, index: int, delta: Delta) -> bytes:
        """Take the next delta of `requests[index]`; return the bytes that a stream sends for it (may be empty)."""

    def last(self) -> bytes:
        """Return the bytes that end a stream, after every sequence has its finish reason."""
        return b""

    def body(self) -> bytes:
        """Return the whole answer, after every sequence has its finish reason. A stream has none."""
        raise NotImplementedError(f"{type(self).__name__} streams its answer")

    def error_chunk(self, error: LmiServerError) -> bytes:
        """Return the last bytes of a stream that fails after it began."""
        return error_event(self.error_route, self.content_type, error)
