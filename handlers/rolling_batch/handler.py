"""The base of handlers whose models run under this project's own rolling batch (`option.rolling_batch`).

Torch and transformers are imported when the model loads, never with this module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handlers.checkpoints.chat_template import read_chat_template, with_prompt_beginning
from handlers.rolling_batch.lora.adapters import LoadedAdapters
from handlers.step_loop import StepLoop
from lmi_server.contract.errors import RequestError, needs_extra
from lmi_server.contract.generation import Delta, Feature, GenerationRequest
from lmi_server.contract.handler import DeltaReceiver, LLMHandler, ModelInfo
from lmi_server.contract.protocol import Adapter
from lmi_server.processes import load_progress, model_imports

if TYPE_CHECKING:
    from handlers.chats.model import ModelChats
    from handlers.rolling_batch.engine import RollingBatchEngine
    from handlers.rolling_batch.engine_loading import LoadedEngine, LoadedModel
    from handlers.rolling_batch.options import RollingBatchOptions
    from handlers.rolling_batch.request_intake import RequestIntake

# Seven requests sent at once reach the engine within ten milliseconds, but a step of prompts takes thirty or more: a
# request that misses the first step by a millisecond waits for all of it.
_GATHER_S = 0.002
_FEATURES: frozenset[Feature] = frozenset({"structured_outputs", "min_tokens", "bad_words", "allowed_token_ids"})


class SchedulingHandler(LLMHandler):
    """Serves the engine that `load_engine` loads."""

    def __init__(self) -> None:
        self._loop: StepLoop[RollingBatchEngine]
        self._loaded: LoadedEngine
        self._adapters: LoadedAdapters
        self._intake: RequestIntake

    @abstractmethod
    def load_engine(self, model_dir: str, options: Any) -> LoadedEngine:
        """Load the model and make its engine, in the thread that will step it. Raises ModelLoadError."""

    def window(self, options: Any) -> int:
        """Return how many waiting requests the scheduler sees beside the running ones."""
        return 0

    def max_white_space(self, options: Any) -> int | None:
        """Return how much white space may stand together in JSON; None: any."""
        return None

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        """Load the model in the thread that will step it: the worker's heartbeat goes on."""

        def build() -> RollingBatchEngine:
            self._loaded = self.load_engine(model_dir, options)
            return self._loaded.engine

        self._loop = StepLoop(build, _GATHER_S)
        await self._loop.start()
        self._adapters = LoadedAdapters(self._loop)
        if options.enable_lora:
            await self._adapters.prepare()
        from handlers.rolling_batch.request_intake import RequestIntake

        self._intake = RequestIntake(self._loaded, self._loop, self._adapters, options, self.max_white_space(options))
        return ModelInfo(
            max_model_len=self._loaded.max_model_len,
            features=_FEATURES | self._intake.features,
            sampling_defaults=self._loaded.sampling_defaults,
            details=self._loaded.details,
            window=self.window(options),
        )

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request."""
        return self._deltas(request)

    def generate_ahead(self, request: GenerationRequest, on_begin: Callable[[], None]) -> AsyncGenerator[Delta, None]:
        return self._deltas(request, self._loop.on_loop(on_begin))

    async def deliver(
        self, request: GenerationRequest, receiver: DeltaReceiver, on_begin: Callable[[], None] | None = None
    ) -> None:
        begin = None if on_begin is None else self._loop.on_loop(on_begin)
        chats = self._loaded.chats
        if chats is not None and chats.concern(request):
            parsed = chats.prepare(request)
            request, receiver = parsed.request, _ParsedDeltas(parsed.parser.parse, receiver)
        await self._loop.deliver(lambda: self._intake.prepare(request, begin), receiver)

    def _deltas(
        self, request: GenerationRequest, begin: Callable[[], None] | None = None
    ) -> AsyncGenerator[Delta, None]:
        chats = self._loaded.chats
        if chats is None or not chats.concern(request):
            return self._generate(request, begin)
        return self._generate_chat(request, chats, begin)

    def _generate(self, request: GenerationRequest, begin: Callable[[], None] | None) -> AsyncGenerator[Delta, None]:
        return self._loop.generate(lambda: self._intake.prepare(request, begin))

    async def _generate_chat(
        self, request: GenerationRequest, chats: ModelChats, begin: Callable[[], None] | None
    ) -> AsyncGenerator[Delta, None]:
        parsed = chats.prepare(request)
        async with aclosing(self._generate(parsed.request, begin)) as deltas:
            async for delta in deltas:
                yield parsed.parser.parse(delta)

    def note_waiting(self, requests: int) -> None:
        self._loop.engine.note_waiting(requests)

    async def tokenize(self, request: GenerationRequest) -> list[int]:
        return await self._intake.count(request)

    def tokenizer(self) -> Any:
        return self._loaded.prompts.tokenizer

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._adapters.registered

    async def add_adapter(self, adapter: Adapter) -> None:
        await self._adapters.add(adapter)

    async def remove_adapter(self, name: str) -> None:
        await self._adapters.remove(name)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._loaded.prompts.detokenize(tokens)

    def stats(self) -> Mapping[str, float]:
        return {**self._loaded.stats(), **self._intake.stats()}

    async def stop(self) -> None:
        self._intake.stop()
        await self._loop.call(self._loaded.engine.stop)
        await self._loop.stop()


class _ParsedDeltas:
    """Gives a receiver the deltas of a chat's answer as `parse` reads them."""

    def __init__(self, parse: Callable[[Delta], Delta], receiver: DeltaReceiver) -> None:
        self._parse = parse
        self._receiver = receiver

    def take(self, delta: Delta) -> bool:
        return self._receiver.take(self._parse(delta))

    async def ready(self) -> None:
        await self._receiver.ready()


class RollingBatchHandler(SchedulingHandler):
    """Serves what `load_model` loads. If the model is split over ranks, rank 0 sends every pass to the others."""

    @abstractmethod
    def load_model(self, model_dir: str, options: Any) -> LoadedModel:
        """Load the model, or this rank's part of it, in the thread that will step it. Raises ModelLoadError."""

    def window(self, options: Any) -> int:
        return int(options.schedule_window)

    async def sleep(self) -> None:
        """Give the KV cache's memory back; the weights are on the host already. Wakes by itself with a request."""
        free, engine = self._loaded.free_cache, self._loaded.engine
        if free is None:
            raise RequestError(
                "the rolling batch keeps the weights of this model on its devices; POST /sleep?level=2 ends its workers"
                " instead, and frees all memory"
            )
        await self._loop.call(engine.forget_prefixes)
        await self._loop.call(free)

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        if running or external:
            name = "reset_running_requests" if running else "reset_external"
            raise RequestError(f"{name}=true: the rolling batch has no such cache; leave the parameter out")
        await self._loop.call(self._loaded.engine.forget_prefixes)
        return True

    def max_white_space(self, options: Any) -> int | None:
        most: int | None = options.max_json_whitespace
        return most

    def follow(self, model_dir: str, options: Any) -> None:
        with model_imports.importing():
            from handlers.rolling_batch.engine_loading import follow

        follow(self.load_model(model_dir, options))

    def load_engine(self, model_dir: str, options: Any) -> LoadedEngine:
        load_progress.report("importing libraries")
        with needs_extra("the rolling batch needs", "huggingface"):
            from handlers.rolling_batch.cpu import first_compilation

            compilation = first_compilation.start(model_dir, options)
            with model_imports.importing():
                from handlers.rolling_batch.engine_loading import load_engine

        def load() -> LoadedModel:
            loaded = self._load_with_template(model_dir, options)
            if compilation is not None:
                compilation.wait()
            return loaded

        try:
            return load_engine(load, options)
        finally:
            if compilation is not None:
                compilation.close()

    def _load_with_template(self, model_dir: str, options: RollingBatchOptions) -> LoadedModel:
        load_progress.report("reading the checkpoint")
        loaded = self.load_model(model_dir, options)
        if options.chat_template is not None:
            template = read_chat_template(options.chat_template, Path(model_dir))
            loaded.tokenizer.chat_template = with_prompt_beginning(template, loaded.tokenizer)
        return loaded
