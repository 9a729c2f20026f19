"""The contract between a worker and the handlers.

One adapter per engine implements `LLMHandler`; what does not generate text is a `RequestHandler`, which takes batches
one after the other, or an `AsyncRequestHandler`, which takes requests side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.generation import Delta, Feature, GenerationRequest
from lmi_server.contract.protocol import Adapter, Input

_NO_MAPPING: Mapping[str, Adapter] = MappingProxyType({})
_NO_ADAPTERS = "this handler serves no LoRA adapters; use another one, or set option.enable_lora=false"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler tells about the model that it loaded. `max_model_len` is in tokens (prompt and output).

    `sampling_defaults` are values of SamplingParameters by name, for what an OpenAI request leaves out.
    """

    max_model_len: int
    features: frozenset[Feature] = frozenset()
    sampling_defaults: Mapping[str, Any] = {}
    details: Mapping[str, Any] = {}  # dtype, KV cache bytes, threads, ...: shown in the log and by `explain`


class LLMHandler(ABC):
    """Serves text generation. One instance per worker; every method runs on the worker's event loop."""

    @abstractmethod
    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        """Load the model. `options` is an instance of the handler's own options class.

        Raises ModelLoadError (or anything else, which fails the load with its message).
        """

    def follow(self, model_dir: str, options: Any) -> None:
        """Be one of the other ranks of an MPI group: load the model and do what rank 0 says, until it says stop.

        A handler that does not override it is refused under the MPI engine. `start` returns on rank 0 once all ranks
        have loaded. Runs in the main thread of the process; `environment.own_rank` tells which rank it is. Raises
        ModelLoadError (or anything else, which fails the load with its message).
        """
        raise NotImplementedError

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of `request`; the last one has a `finish_reason`.

        Closing the generator (`aclose`, or cancelling the task that iterates it) aborts the request: its slot is free
        within one step. Raises RequestError where the request cannot be served as sent.
        """

    @abstractmethod
    async def tokenize(self, request: GenerationRequest) -> Sequence[int]:
        """Return the token ids of the prompt of `request`, as `generate` would have them.

        Raises RequestError where the prompt cannot be rendered.
        """

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids. Raises RequestError where one of them is not in the vocabulary."""
        raise RequestError("this model's handler does not turn tokens into text")

    def tokenizer(self) -> Any:
        """Return the tokenizer of the loaded model for its own code; None where there is none like transformers'."""
        return None

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may name in `GenerationRequest.adapter`, by name, as `add_adapter` got them.

        After `start` it is one mapping that changes as adapters come and go; the worker keeps no list of its own.
        """
        return _NO_MAPPING

    async def add_adapter(self, adapter: Adapter) -> None:
        """Add a LoRA adapter, or replace the one of that name; requests that run keep the weights they began with.

        Raises RequestError if it is not supported or does not fit the model, ModelMemoryError if there is no room;
        nothing has changed then.
        """
        raise RequestError(_NO_ADAPTERS)

    async def remove_adapter(self, name: str) -> None:
        """Remove an adapter; requests that run with it finish. Does nothing if there is none of that name."""
        return

    def metrics(self) -> bytes:
        """Return what the engine measures of itself in Prometheus' text format; it stands in /metrics beside ours."""
        return b""

    def stats(self) -> Mapping[str, float]:
        """Return gauges of the engine, by Prometheus name without prefix (`running_requests`, ...)."""
        return {}

    async def stop(self) -> None:
        """Release the engine; no `generate` is running any more."""
        return


class Response(msgspec.Struct, kw_only=True):
    """What is answered to one request: a whole body, or a stream of pieces.

    A piece of `stream` leaves as soon as it is there; an exception in the stream ends it with an error event. An
    iterator that is asynchronous is for an `AsyncRequestHandler` only. `after` is called once the answer is on its way,
    whether it ended well or not.
    """

    status: int = 200
    headers: list[tuple[str, str]] = []
    data: bytes = b""
    stream: Iterator[bytes] | AsyncIterator[bytes] | None = None
    after: Callable[[], None] | None = None


class RequestHandler(ABC):
    """Serves whatever is not text generation, in batches of up to option.batch_size requests.

    One instance per worker; every method runs in the main thread of the process, one call at a time. `served_names`
    are those under which requests ask for the model, its own first; the worker sets them before `start`.
    """

    served_names: Sequence[str] = ()

    @abstractmethod
    def start(self, model_dir: str, options: Any) -> ModelInfo:
        """Load the model. `options` is an instance of the handler's own options class.

        Raises ModelLoadError (or anything else, which fails the load with its message).
        """

    def follow(self, model_dir: str, options: Any) -> None:
        """Be one of the other ranks of an MPI group, as `LLMHandler.follow` tells."""
        raise NotImplementedError

    @abstractmethod
    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        """Answer a batch: one outcome per request, in order; an error fails its own request alone.

        Whatever is raised fails the whole batch.
        """

    def concurrent_handler(self) -> AsyncRequestHandler | LLMHandler | None:
        """Return a handler that takes the requests concurrently, in place of `handle`; None if `handle` takes them.

        The worker asks once, after `start`, and then starts that handler. It runs on an event loop of its own in the
        main thread, so it may block that loop for a while without being taken for dead.
        """
        return None

    def add_adapter(self, adapter: Adapter) -> str:
        """Take a LoRA adapter in the place of one of its name, if there is one; return what the caller is told, or "".

        Raises RequestError (or anything else) where it cannot be used; nothing has changed then.
        """
        raise RequestError(_NO_ADAPTERS)

    def remove_adapter(self, name: str) -> str:
        """Forget an adapter that `add_adapter` took; return what the caller is told, or ""."""
        raise RequestError(_NO_ADAPTERS)

    def stop(self) -> None:
        """Release what `start` took."""
        return


class AsyncRequestHandler(ABC):
    """Serves whatever is not text generation, requests side by side: up to option.max_rolling_batch_size at once."""

    async def start(self) -> None:
        """Load what is bound to the event loop."""
        return

    @abstractmethod
    async def handle(self, request: Input) -> Response:
        """Answer one request. What is raised fails it; a cancellation means that its client is gone."""

    async def add_adapter(self, adapter: Adapter) -> str:
        """Take a LoRA adapter, as `RequestHandler.add_adapter` does."""
        raise RequestError(_NO_ADAPTERS)

    async def remove_adapter(self, name: str) -> str:
        """Forget a LoRA adapter, as `RequestHandler.remove_adapter` does."""
        raise RequestError(_NO_ADAPTERS)

    async def stop(self) -> None:
        """Release what `start` took."""
        return
