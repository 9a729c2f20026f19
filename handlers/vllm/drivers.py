"""The two ways to drive vLLM's engine: stepped in the worker's process, or in processes of its own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Protocol

from handlers.step_loop import AddRequest, Output, StepLoop
from handlers.vllm import library
from handlers.vllm.compilation import BackgroundCompilation
from handlers.vllm.outputs import Answer
from handlers.vllm.requests import CLIENT_ERRORS, as_request_error
from lmi_server.contract.errors import HandlerError, LmiServerError
from lmi_server.contract.generation import Delta

_log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.2  # between two looks at an idle engine


class Driver(Protocol):
    """Runs requests on an engine that is loaded."""

    def generate(
        self, request_id: str, prompt: Any, answer: Answer, priority: int, adapter: library.LoRARequest | None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a request, under an id that nobody else uses; closing the generator aborts it."""
        ...

    async def add_lora(self, adapter: library.LoRARequest) -> None:
        """Load an adapter's weights. Raises whatever vLLM does."""
        ...

    async def pin_lora(self, number: int) -> None:
        """Keep the weights of a loaded adapter."""
        ...

    async def remove_lora(self, number: int) -> None:
        """Forget the weights of an adapter; requests that name it load them again."""
        ...

    @property
    def unfinished(self) -> int:
        """How many requests the engine holds."""
        ...

    async def stop(self) -> None:
        """Release the engine."""
        ...


class InProcessDriver:
    """The engine core lives in this process; the thread that built it steps it."""

    def __init__(self, loop: StepLoop[InProcessEngine], background: BackgroundCompilation | None) -> None:
        self._loop = loop
        self._background = background

    def generate(
        self, request_id: str, prompt: Any, answer: Answer, priority: int, adapter: library.LoRARequest | None
    ) -> AsyncGenerator[Delta, None]:
        engine = self._loop.engine

        async def prepare() -> AddRequest:
            return lambda emit: engine.add(request_id, prompt, answer, priority, adapter, emit)

        return self._loop.generate(request_id, prepare)

    async def add_lora(self, adapter: library.LoRARequest) -> None:
        await self._loop.call(lambda: self._loop.engine.engine.add_lora(adapter))

    async def pin_lora(self, number: int) -> None:
        await self._loop.call(lambda: self._loop.engine.engine.pin_lora(number))

    async def remove_lora(self, number: int) -> None:
        await self._loop.call(lambda: self._loop.engine.engine.remove_lora(number))

    @property
    def unfinished(self) -> int:
        return int(self._loop.engine.engine.get_num_unfinished_requests())

    async def stop(self) -> None:
        if self._background is not None:
            self._background.stop()
        await self._loop.stop()
        await asyncio.to_thread(self._loop.engine.engine.engine_core.shutdown)


class InProcessEngine:
    """What the step loop steps. Not thread-safe: it is called from the loop's thread."""

    def __init__(self, engine: library.LLMEngine) -> None:
        self.engine = engine
        self._requests: dict[str, tuple[Answer, Callable[[Output], None]]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt: Any,
        answer: Answer,
        priority: int,
        adapter: library.LoRARequest | None,
        emit: Callable[[Output], None],
    ) -> None:
        """Give the engine a request; `emit` gets its deltas from `step`. Raises RequestError where vLLM refuses it."""
        try:
            self.engine.add_request(request_id, prompt, answer.parameters, lora_request=adapter, priority=priority)
        except CLIENT_ERRORS as error:
            raise as_request_error(error) from error
        self._requests[request_id] = (answer, emit)

    def abort(self, request_id: str) -> None:
        """Free the request's place; one that has ended is none of ours any more."""
        if self._requests.pop(request_id, None):
            self.engine.abort_request([request_id])

    def step(self) -> None:
        for output in self.engine.step():
            answer, emit = self._requests[output.request_id]
            if output.finished:
                del self._requests[output.request_id]
            emit(answer.take(output))

    def fail_running(self, error: Exception) -> None:
        """End the process: after an exception vLLM's core is in no known state, and another worker takes over."""
        raise error


class OwnProcessDriver:
    """The engine core and its workers are processes of their own; vLLM's asynchronous engine talks to them."""

    def __init__(self, engine: library.AsyncLLM) -> None:
        self._engine = engine
        self._watch = asyncio.create_task(self._die_with_engine())

    async def generate(
        self, request_id: str, prompt: Any, answer: Answer, priority: int, adapter: library.LoRARequest | None
    ) -> AsyncGenerator[Delta, None]:
        outputs = self._engine.generate(prompt, answer.parameters, request_id, lora_request=adapter, priority=priority)
        try:
            async for output in outputs:
                delta = answer.take(output)
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

    async def add_lora(self, adapter: library.LoRARequest) -> None:
        await self._engine.add_lora(adapter)

    async def pin_lora(self, number: int) -> None:
        await self._engine.pin_lora(number)

    async def remove_lora(self, number: int) -> None:
        await self._engine.remove_lora(number)

    @property
    def unfinished(self) -> int:
        return int(self._engine.get_num_unfinished_requests())

    async def stop(self) -> None:
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        await asyncio.to_thread(self._engine.shutdown)

    async def _die_with_engine(self) -> None:
        while not library.is_dead(self._engine):  # noqa: ASYNC110 - vLLM offers nothing to wait for
            await asyncio.sleep(_LOOK_INTERVAL_S)
        end_process()


def end_process() -> None:
    """End this process at once: its end tells the front end, which retries or fails what it held."""
    _log.critical("vLLM's engine died")
    logging.shutdown()
    os._exit(1)
