"""The contract between a worker and the handlers.

An engine that generates text has an `LLMHandler`. Anything else is a `RequestHandler` (one batch after the other) or an
`AsyncRequestHandler` (requests concurrently).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.generation import Delta, Feature, GenerationRequest
from lmi_server.contract.protocol import Adapter, Input

BURST = 8
"""What a request that never waits may produce before the others have their turn."""

_EMPTY: Mapping[str, Adapter] = MappingProxyType({})
_NO_SLEEP = (
    "the handler of this model keeps its weights where they are; POST /sleep?level=2 ends its workers instead, and"
    " frees all memory"
)
_NO_ADAPTERS = (
    "the handler of this model serves no LoRA adapters; choose another handler or set option.enable_lora=false"
)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A handler's report about the model that it loaded.

    `max_model_len` counts the tokens of prompt and output. `sampling_defaults` are values of SamplingParameters by
    name, for the fields that an OpenAI request leaves out. `window` is the number of waiting requests that the
    scheduler wants to see beside the running ones; they come by `LLMHandler.generate_ahead`.
    """

    max_model_len: int
    features: frozenset[Feature] = frozenset()
    sampling_defaults: Mapping[str, Any] = {}
    details: Mapping[str, Any] = {}  # dtype, KV cache bytes, threads, ...: shown in the log and by `explain`
    window: int = 0


class DeltaReceiver(Protocol):
    """Takes the deltas of one request."""

    def take(self, delta: Delta) -> bool:
        """Take a delta; return whether the next one may come at once. Raises what the code of a format raises."""
        ...

    def ready(self) -> Awaitable[None]:
        """Give other requests their turn, then wait until the next delta may come."""
        ...


class LLMHandler(ABC):
    """Generates text. One instance per worker; every method but `follow` runs on the worker's event loop."""

    @abstractmethod
    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        """Load the model. `options` is an instance of the handler's own options class.

        Raises ModelLoadError (or anything else, which fails the load with its message).
        """

    def follow(self, model_dir: str, options: Any) -> None:
        """Run one of the other ranks of an MPI group: load the model and do what rank 0 sends, until it sends the end.

        A handler that does not override it is refused under the MPI engine. On rank 0, `start` returns once all ranks
        have loaded. Runs in the main thread of the process; `environment.own_rank` returns the rank. Raises
        ModelLoadError (or anything else, which fails the load with its message).
        """
        raise NotImplementedError

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of `request`; the last one has a `finish_reason`.

        Closing the generator (`aclose`, or cancelling the task that iterates it) aborts the request: its slot is free
        within one step. Raises RequestError if the request cannot be served as sent.
        """

    def generate_ahead(self, request: GenerationRequest, on_begin: Callable[[], None]) -> AsyncGenerator[Delta, None]:
        """Do the same as `generate` for a request that has no place yet; `on_begin` is called once it has one.

        Only a handler whose `ModelInfo.window` is not 0 gets such requests.
        """
        on_begin()
        return self.generate(request)

    async def deliver(
        self, request: GenerationRequest, receiver: DeltaReceiver, on_begin: Callable[[], None] | None = None
    ) -> None:
        """Give `receiver` the deltas of `request`. With `on_begin` it has no place yet, as for `generate_ahead`.

        A handler whose deltas come by themselves can give them without a turn of the request's task for each.
        """
        deltas = self.generate(request) if on_begin is None else self.generate_ahead(request, on_begin)
        left, take = BURST, receiver.take
        try:
            async for delta in deltas:
                left -= 1
                if not take(delta) or not left:
                    left = left or BURST
                    await receiver.ready()
        finally:  # `aclosing` would be an object and two coroutines for each request
            await deltas.aclose()

    def note_waiting(self, requests: int) -> None:
        """Note how many requests wait that the handler has not seen, for its statistics."""
        return

    @abstractmethod
    async def tokenize(self, request: GenerationRequest) -> Sequence[int]:
        """Return the token ids of the prompt that `generate` would compute for `request`.

        Raises RequestError if the prompt cannot be rendered.
        """

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids. Raises RequestError if one of them is not in the vocabulary."""
        raise RequestError("the handler of this model cannot turn tokens into text")

    def tokenizer(self) -> Any:
        """Return the tokenizer for the code of a model.py; None if the model has none of transformers' interface."""
        return None

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may name in `GenerationRequest.adapter`, by name, as `add_adapter` got them.

        After `start` it is one mapping that changes as adapters come and go; the worker keeps no list of its own.
        """
        return _EMPTY

    async def add_adapter(self, adapter: Adapter) -> None:
        """Add a LoRA adapter, or replace the one of that name; requests that run keep the weights they began with.

        Raises RequestError if it is not supported or does not fit the model, ModelMemoryError if there is no room;
        nothing has changed then.
        """
        raise RequestError(_NO_ADAPTERS)

    async def remove_adapter(self, name: str) -> None:
        """Remove an adapter; requests that run with it finish. Does nothing if there is none of that name."""
        return

    async def sleep(self) -> None:
        """Give back the memory that no weights take, and move weights from devices to the host, until `wake_up`.

        No request runs, and none comes before that. Raises RequestError if the engine cannot; nothing has changed then.
        """
        raise RequestError(_NO_SLEEP)

    async def wake_up(self) -> None:
        """Undo `sleep`. Does nothing if the model is awake."""
        return

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        """Forget the computed prefixes of prompts; return False if some stay because requests hold them.

        With `running` those requests compute their prompts again; with `external` what a connector keeps elsewhere
        goes, too. Raises RequestError for what the engine cannot.
        """
        raise RequestError("the handler of this model has no prefix cache that can be reset")

    def metrics(self) -> bytes:
        """Return the engine's own metrics in Prometheus' text format, which /metrics repeats."""
        return b""

    def stats(self) -> Mapping[str, float]:
        """Return gauges and counters of the engine, by Prometheus name without prefix (`running_requests`, ...).

        A value that only grows is a counter, and its name ends with `_total` (`generated_tokens_total`).
        """
        return {}

    async def stop(self) -> None:
        """Release the engine; no `generate` is running any more."""
        return


class Response(msgspec.Struct, kw_only=True):
    """The answer to one request: a whole body, or a stream of pieces.

    A piece of `stream` leaves as soon as the iterator yields it; an exception in the stream ends it with an error
    event. Only an `AsyncRequestHandler` may return an asynchronous iterator. The worker calls `after` once the answer
    is on its way, whether it ended well or not. `reason` is the phrase behind the status in HTTP's first line:
    printable ASCII, or empty for the phrase of the status. `error` is the text of an exception that `data` reports: the
    front end hides secrets in it, and local paths from clients elsewhere.
    """

    status: int = 200
    headers: list[tuple[str, str]] = []
    data: bytes = b""
    stream: Iterator[bytes] | AsyncIterator[bytes] | None = None
    after: Callable[[], None] | None = None
    reason: str = ""
    error: str = ""


class RequestHandler(ABC):
    """Serves anything but text generation, in batches of up to option.batch_size requests.

    One instance per worker; every method runs in the main thread of the process, one call at a time. The worker sets
    `served_names` before `start`: the names by which requests ask for the model, its own name first. It sets
    `is_cancelled` before `handle`, which may ask it at any time whether the client of one of its requests is gone.
    """

    served_names: Sequence[str] = ()
    is_cancelled: Callable[[Input], bool] = staticmethod(lambda request: False)
    reads_tensors = False  # requests of dialects that are translated for others go to `handle` as they were sent

    @abstractmethod
    def start(self, model_dir: str, options: Any) -> ModelInfo:
        """Load the model. `options` is an instance of the handler's own options class.

        Raises ModelLoadError (or anything else, which fails the load with its message).
        """

    def follow(self, model_dir: str, options: Any) -> None:
        """Be one of the other ranks of an MPI group, as `LLMHandler.follow` does."""
        raise NotImplementedError

    @abstractmethod
    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        """Answer a batch; return one outcome per request, in order. An error among them fails its own request alone.

        An exception fails the whole batch.
        """

    def concurrent_handler(self) -> AsyncRequestHandler | LLMHandler | None:
        """Return a handler that takes the requests concurrently, in place of `handle`; None if `handle` takes them.

        The worker asks once, after `start`, and then starts that handler. It runs on an event loop of its own in the
        main thread, so it may block that loop for a while without being taken for dead.
        """
        return None

    def add_adapter(self, adapter: Adapter) -> str:
        """Add a LoRA adapter, or replace the one of that name; return a message for the caller, or "".

        Raises RequestError (or anything else) if it cannot be used; nothing has changed then.
        """
        raise RequestError(_NO_ADAPTERS)

    def remove_adapter(self, name: str) -> str:
        """Remove an adapter; return a message for the caller, or ""."""
        raise RequestError(_NO_ADAPTERS)

    def stop(self) -> None:
        """Release what `start` acquired."""
        return


class AsyncRequestHandler(ABC):
    """Serves anything but text generation, up to option.max_rolling_batch_size requests concurrently.

    Every method runs on an event loop in the main thread of the process. The worker sets `note_progress` before
    `start`: a handler calls it, on that loop, when it goes on with a request without a stream. Without progress
    for option.predict_timeout a request fails.
    """

    note_progress: Callable[[Input], None] = staticmethod(lambda request: None)
    reads_tensors = True  # as that of RequestHandler

    async def start(self) -> None:
        """Load what needs the running event loop."""
        return

    @abstractmethod
    async def handle(self, request: Input) -> Response:
        """Answer one request. An exception fails it; a cancellation means that its client is gone."""

    async def add_adapter(self, adapter: Adapter) -> str:
        """Add a LoRA adapter, as `RequestHandler.add_adapter` does."""
        raise RequestError(_NO_ADAPTERS)

    async def remove_adapter(self, name: str) -> str:
        """Remove a LoRA adapter, as `RequestHandler.remove_adapter` does."""
        raise RequestError(_NO_ADAPTERS)

    async def stop(self) -> None:
        """Release what `start` acquired."""
        return
