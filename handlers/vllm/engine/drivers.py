"""The two ways to drive vLLM's engine: stepped in the worker's own process, or in processes of its own.

`option.engine_process` decides where the engine core (scheduler, model, KV cache) runs:

- `worker`: in the worker's process, where the thread of a step loop calls `step`. The model loads in a third of the
  time, because vLLM is imported once. The event loop waits for the GIL while that thread schedules and detokenizes.
  Without a GPU that costs less than a second process on the same cores.
- `own`: in a process of its own, with vLLM's asynchronous engine in between. It is the default beside a GPU, which then
  never waits for the worker's Python code.

Both end the worker if the engine dies: vLLM's core guarantees nothing after an exception. The front end then retries or
fails the worker's requests and starts another worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from handlers.step_loop import AddRequest, Output, StepLoop
from handlers.vllm import library
from handlers.vllm.compilation.background import BackgroundCompilation
from handlers.vllm.requests.outputs import DeltaBuilder
from handlers.vllm.requests.rendering import CLIENT_ERRORS, as_request_error
from lmi_server.contract.errors import HandlerError, LmiServerError, failure_of
from lmi_server.contract.generation import Delta

logger = logging.getLogger(__name__)

_LIVENESS_INTERVAL_S = 0.2
_HOST = 1  # vLLM's level of sleep at which the host keeps the weights


class Driver(ABC):
    """Runs requests on a loaded engine."""

    def __init__(self, engine: Any) -> None:
        """`engine` is vLLM's."""
        self._engine = engine

    @abstractmethod
    def generate(
        self, prompt: Any, deltas: DeltaBuilder, priority: int, adapter: library.LoRARequest | None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a request; closing the generator aborts it.

        vLLM gets an id of the driver's own: the ids of clients need not be unique, and some of vLLM's connectors read
        addresses in them. Raises RequestError if vLLM refuses the request, HandlerError if it fails in it.
        """

    @abstractmethod
    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a method of vLLM's engine returns, called where the engine may be called."""

    async def add_lora(self, adapter: library.LoRARequest) -> None:
        """Load the weights of an adapter. Raises whatever vLLM raises."""
        await self._call(self._engine.add_lora, adapter)

    async def pin_lora(self, number: int) -> None:
        """Keep the weights of a loaded adapter in memory for good."""
        await self._call(self._engine.pin_lora, number)

    async def remove_lora(self, number: int) -> None:
        """Drop the weights of an adapter. A request that still names it loads them again."""
        await self._call(self._engine.remove_lora, number)

    async def sleep(self) -> None:
        """Move the weights to the host and drop the KV cache. Raises whatever vLLM raises."""
        await self._call(lambda: self._engine.sleep(level=_HOST))

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await self._call(self._engine.wake_up)

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        """Drop the prefix cache; return False if requests hold a part of it."""
        return bool(await self._call(self._engine.reset_prefix_cache, running, external))

    @property
    def unfinished(self) -> int:
        """The number of requests that the engine holds, waiting or running."""
        return int(self._engine.get_num_unfinished_requests())

    @abstractmethod
    async def stop(self) -> None:
        """Release the engine."""


class InProcessDriver(Driver):
    """Drives an engine whose core lives in this process; the thread that built the engine steps it."""

    def __init__(self, loop: StepLoop[InProcessEngine]) -> None:
        super().__init__(loop.engine.engine)
        self._loop = loop

    def generate(
        self, prompt: Any, deltas: DeltaBuilder, priority: int, adapter: library.LoRARequest | None
    ) -> AsyncGenerator[Delta, None]:
        engine = self._loop.engine

        async def prepare() -> AddRequest:
            return lambda emit: engine.add(prompt, deltas, priority, adapter, emit)

        return self._loop.generate(prepare)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.call(lambda: method(*arguments))

    async def stop(self) -> None:
        if self._loop.engine.compilation is not None:
            self._loop.engine.compilation.stop()
        await self._loop.stop()
        await asyncio.to_thread(self._engine.engine_core.shutdown)


class InProcessEngine:
    """What the step loop steps: vLLM's engine and the requests in it.

    Not thread-safe: only the loop's thread calls it. `compilation` compiles the model in the background, if anything
    does.
    """

    def __init__(self, engine: library.LLMEngine, compilation: BackgroundCompilation | None) -> None:
        self.engine = engine
        self.compilation = compilation
        self._numbers = itertools.count(1)
        self._requests: dict[str, tuple[DeltaBuilder, Callable[[Output], None]]] = {}  # by number, as vLLM has it

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(
        self,
        prompt: Any,
        deltas: DeltaBuilder,
        priority: int,
        adapter: library.LoRARequest | None,
        emit: Callable[[Output], None],
    ) -> int:
        """Add a request to the engine, and return its number; `step` hands its deltas to `emit`.

        Raises RequestError if vLLM refuses it.
        """
        number = next(self._numbers)
        try:
            self.engine.add_request(str(number), prompt, deltas.parameters, lora_request=adapter, priority=priority)
        except CLIENT_ERRORS as error:
            raise as_request_error(error) from error
        self._requests[str(number)] = (deltas, emit)
        return number

    def abort(self, number: int) -> None:
        """Remove a request from the engine. Finished requests are ignored."""
        if self._requests.pop(str(number), None):
            self.engine.abort_request([str(number)])

    def step(self) -> None:
        for output in self.engine.step():
            if output.request_id in self._requests:  # else vLLM reports that a request was aborted
                self._hand_on(output)

    def _hand_on(self, output: Any) -> None:
        deltas, emit = self._requests[output.request_id]
        if output.finished:
            del self._requests[output.request_id]
        try:
            delta = deltas.build(output)
        # The border to tokenizers, which may raise anything: the text of one request must not end the others.
        except BaseException as error:
            logger.exception("a request fails: its output has no text")
            self.abort(int(output.request_id))
            delta = failure_of(error)
        emit(delta)

    def fail_running(self, error: BaseException) -> None:
        """End the process by raising `error` in the loop's thread: vLLM's core guarantees nothing after an exception.

        Failing only the requests of the step would leave their KV cache blocks allocated and the scheduler in an
        unknown state. Another worker takes over.
        """
        raise error


class OwnProcessDriver(Driver):
    """Drives an engine whose core and workers are processes of their own, through vLLM's asynchronous engine."""

    def __init__(self, engine: library.AsyncLLM) -> None:
        super().__init__(engine)
        self._numbers = itertools.count(1)
        self._watch = asyncio.create_task(self._end_with_engine())

    async def generate(
        self, prompt: Any, deltas: DeltaBuilder, priority: int, adapter: library.LoRARequest | None
    ) -> AsyncGenerator[Delta, None]:
        number = str(next(self._numbers))
        outputs = self._engine.generate(prompt, deltas.parameters, number, lora_request=adapter, priority=priority)
        try:
            async for output in outputs:
                delta = deltas.build(output)
                if isinstance(delta, LmiServerError):
                    raise delta
                yield delta
        except library.EngineDeadError:
            end_process()
        except CLIENT_ERRORS as error:
            raise as_request_error(error) from error
        except library.EngineGenerateError as error:
            raise HandlerError(f"vLLM could not generate: {error.__cause__ or error}") from error
        finally:
            await outputs.aclose()

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await method(*arguments)

    async def stop(self) -> None:
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        await asyncio.to_thread(self._engine.shutdown)

    async def _end_with_engine(self) -> None:
        """End this process soon after the engine's, even if no request runs that would notice."""
        while not library.is_dead(self._engine):  # noqa: ASYNC110 - vLLM offers nothing to wait for
            await asyncio.sleep(_LIVENESS_INTERVAL_S)
        end_process()


def end_process() -> None:
    """End this process at once. The front end sees its link close, and retries or fails the requests that it had.

    `sys.exit` would not do: any thread may call this, and vLLM's exit handlers may wait for the engine that died.
    """
    logger.critical("vLLM's engine died; this worker ends, and a new one takes over")
    logging.shutdown()
    os._exit(1)
