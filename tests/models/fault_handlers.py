"""Handlers that misbehave on purpose, for tests only. The first word of the prompt says how."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from handlers.echo.handler import EchoHandler
from lmi_server.contract.errors import ModelLoadError, RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, Usage
from lmi_server.contract.handler import ModelInfo
from lmi_server.contract.protocol import Adapter
from lmi_server.processes import load_progress


class FaultHandler(EchoHandler):
    """Echoes, unless the prompt's first word names a fault."""

    def __init__(self) -> None:
        super().__init__()
        self._model_dir = Path()

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        self._model_dir = Path(model_dir)
        return await super().start(model_dir, options)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self._running += 1
        try:
            async for delta in self._faulty(request):
                yield delta
        finally:
            self._running -= 1

    async def _faulty(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        fault = str(request.prompt).split()[0]
        if fault == "refuse":
            raise RequestError("the prompt is refused")
        if fault == "raise":
            raise RuntimeError("raised before the first token")
        if fault == "name-a-path":
            self._name_a_path()
        if fault == "exit":
            os._exit(7)
        if fault == "exit-once" and self._is_first(fault):
            os._exit(7)
        if fault == "wait" or (fault == "wait-once" and self._is_first(fault)):
            await asyncio.Event().wait()
        if fault == "cancel":
            raise asyncio.CancelledError
        if fault == "crowd":
            for _ in range(20):
                await asyncio.sleep(0)
            yield Delta(str(self._running), finish_reason="eos_token", usage=Usage(1, 1))
            return
        if fault == "leak":
            self.leaked = os.urandom(400 << 20)
            await asyncio.Event().wait()
        if fault == "hang":
            time.sleep(3600)  # noqa: ASYNC251 - the point: it blocks the worker's loop
        if fault.startswith("token-then-"):
            yield Delta("token ", prompt_text=str(request.prompt))
            await asyncio.sleep(0.05)
            await self._after_a_token(fault.removeprefix("token-then-"))
        if fault == "print":
            print("\n".join(["x" * 100] * 3000), flush=True)
        if fault == "flood":
            while True:
                yield Delta("x" * 65536)
        async for delta in super().generate(request):
            yield delta

    async def add_adapter(self, adapter: Adapter) -> None:
        fault = adapter.name
        if fault == "refuse" or (fault == "refuse-second" and not self._is_first(fault)):
            raise RequestError("the adapter is refused")
        if fault == "raise":
            raise RuntimeError("raised while it was loaded")
        if fault == "too-big":
            raise MemoryError("no room for it")
        if fault == "exit":
            os._exit(7)
        if fault == "wait":
            logging.getLogger("fault_handlers").warning("an adapter loads")
            await asyncio.Event().wait()
        await super().add_adapter(adapter)

    def _is_first(self, fault: str) -> bool:
        """Return whether no worker of this model has seen the fault before."""
        try:
            (self._model_dir / f"saw-{fault}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _name_a_path(self) -> None:
        token = os.environ.get("HF_TOKEN")
        raise RuntimeError(f'no "weights":\n{self._model_dir}/größe.bin with {token}, s3://me:{token}@x\u2028')

    async def _after_a_token(self, fault: str) -> None:
        if fault == "name-a-path":
            self._name_a_path()
        if fault == "raise":
            raise RuntimeError("raised after a token")
        if fault == "cancel":
            raise asyncio.CancelledError
        if fault == "exit":
            os._exit(7)
        if fault == "wait":
            await asyncio.Event().wait()


class WindowHandler(FaultHandler):
    """Has one place and sees four waiting prompts, of which the last one in the alphabet comes first."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[str, asyncio.Event]] = []
        self._busy = False
        self._waiting_elsewhere = 0

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        return replace(await super().start(model_dir, options), window=4)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        return self._in_turn(request, lambda: None)

    def generate_ahead(self, request: GenerationRequest, on_begin: Callable[[], None]) -> AsyncGenerator[Delta, None]:
        return self._in_turn(request, on_begin)

    def note_waiting(self, requests: int) -> None:
        self._waiting_elsewhere = requests

    def stats(self) -> dict[str, float]:
        return {"waiting_elsewhere": self._waiting_elsewhere}

    async def _in_turn(self, request: GenerationRequest, on_begin: Callable[[], None]) -> AsyncGenerator[Delta, None]:
        entry = (str(request.prompt), asyncio.Event())
        self._waiting.append(entry)
        self._admit()
        try:
            await entry[1].wait()
            on_begin()
            async for delta in super().generate(request):
                yield delta
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self._busy = False
                self._admit()

    def _admit(self) -> None:
        if self._waiting and not self._busy:
            self._busy = True
            entry = max(self._waiting, key=lambda entry: entry[0])
            self._waiting.remove(entry)
            entry[1].set()


class UnfinishedHandler(EchoHandler):
    """Ends a sequence without a finish reason."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        yield Delta("token")


class FailingHandler(EchoHandler):
    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        raise ModelLoadError("the weights are missing")


class RaisingHandler(EchoHandler):
    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        raise ValueError("not a model")


class GreedyHandler(EchoHandler):
    """Does not fit in memory, and reports it as engines do: as the cause of another error."""

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        try:
            raise MemoryError("17 GiB are not free")
        except MemoryError as error:
            raise ModelLoadError(f"the weights do not fit: {error}") from error


class TalkativeHandler(EchoHandler):
    """Logs its start, and each prompt if the options ask for it."""

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        logging.getLogger("fault_handlers").debug("started")
        return await super().start(model_dir, options)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        logging.getLogger("fault_handlers").debug("%s", request.prompt)
        async for delta in super().generate(request):
            yield delta


class EnvironmentHandler(EchoHandler):
    """Reports in its gauges which devices it sees."""

    def stats(self) -> dict[str, float]:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {f"gpu_{gpu}": 1.0 for gpu in gpus.split(",") if gpu} | {"threads": float(os.environ["THREADS"])}


class StubbornHandler(EchoHandler):
    """Does not let go of a request whose client has left."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        while str(request.prompt) == "stubborn":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        async for delta in super().generate(request):
            yield delta


class CrowdedHandler(EchoHandler):
    """There is memory for one of these on the machine."""

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        if self._is_taken(Path(model_dir) / "pid"):
            await GreedyHandler().start(model_dir, options)
        return await super().start(model_dir, options)

    @staticmethod
    def _is_taken(marker: Path) -> bool:
        if marker.exists() and Path("/proc", marker.read_text()).exists():
            return True
        marker.write_text(str(os.getpid()))
        return False


class ExitingHandler(EchoHandler):
    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        os._exit(9)


class GatedHandler(EchoHandler):
    """Is loaded once the file `go` is in the model directory."""

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        while not (Path(model_dir) / "go").exists():  # noqa: ASYNC110 - the gate is in another process
            await asyncio.sleep(0.01)
        return await super().start(model_dir, options)


class ReportingHandler(GatedHandler):
    """Says how far it is in loading, in words that would be markup and another line of a log."""

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        load_progress.report("<img src=x onerror=alert(1)>\n" + 1000 * "x", 3, 4, "parts")
        return await super().start(model_dir, options)


class OnceHandler(EchoHandler):
    """Loads the first time only."""

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        marker = Path(model_dir) / "loaded"
        if marker.exists():
            raise ModelLoadError("the model is loaded once")
        marker.touch()
        return await super().start(model_dir, options)


class CachingHandler(FaultHandler):
    """Reports a KV cache, as engines do."""

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "waiting_requests": 0, "kv_cache_usage": 0.25, "generated_tokens_total": 7}
