"""What a request needs before the engine takes it: its grammar, the weights of its adapter, its tokens and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.engine_loading import LoadedEngine
from handlers.rolling_batch.grammars import Grammar
from handlers.rolling_batch.lora.adapters import LoadedAdapters
from handlers.step_loop import AddRequest, StepLoop
from handlers.structured_output.compiler import GrammarCache
from handlers.structured_output.token_grammars import GrammarMatch, TokenGrammars
from lmi_server.contract.generation import Feature, GenerationRequest, StructuredOutputs

if TYPE_CHECKING:
    from handlers.rolling_batch.images.intake import ImageIntake


class RequestIntake:
    """Prepares requests for a loaded engine. `max_white_space`: how much may stand together in JSON; None: any."""

    def __init__(
        self,
        loaded: LoadedEngine,
        loop: StepLoop[RollingBatchEngine],
        adapters: LoadedAdapters,
        options: Any,
        max_white_space: int | None,
    ) -> None:
        self._loaded = loaded
        self._loop = loop
        self._adapters = adapters
        tokens = TokenGrammars(loaded.prompts.tokenizer, loaded.engine.vocabulary, loaded.engine.end_ids)
        self._grammars = GrammarCache(tokens.compile, max_white_space=max_white_space)
        self._images: ImageIntake | None = None
        if loaded.images is not None:
            from handlers.rolling_batch.images.intake import ImageIntake

            self._images = ImageIntake(loaded.images, loaded.prompts, loop, options, loaded.max_model_len)

    @property
    def features(self) -> frozenset[Feature]:
        """What the model can beside text."""
        chats: frozenset[Feature] = frozenset() if self._loaded.chats is None else frozenset({"tools"})
        media: frozenset[Feature] = frozenset() if self._images is None else frozenset({"media"})
        return chats | media

    async def prepare(self, request: GenerationRequest, on_begin: Callable[[], None] | None) -> AddRequest:
        """Return what adds the request to the engine. Raises RequestError if it cannot be served."""
        grammar = await self._grammar(request.sampling.structured_outputs)
        weights = None if request.adapter is None else await self._adapters.weights(request.adapter)
        images = None
        if self._images is not None and self._images.concerns(request):
            prompt, text, images = await self._images.encode(request)
        else:
            prompt, text = await self._loaded.prompts.encode(request, self._loaded.max_model_len)
        engine = self._loop.engine
        return lambda emit: engine.add(
            request.request_id,
            prompt,
            request.sampling,
            text,
            request.priority,
            emit,
            weights,
            on_begin,
            grammar,
            images,
        )

    async def _grammar(self, constraint: StructuredOutputs | None) -> Grammar | None:
        return None if constraint is None else GrammarMatch(await self._grammars.get(constraint))

    async def count(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a request's prompt."""
        if self._images is not None and self._images.concerns(request):
            return await self._images.count(request)
        return await self._loaded.prompts.count(request, self._loaded.max_model_len)

    def stats(self) -> Mapping[str, float]:
        """Return the figures of images."""
        return {} if self._images is None else self._images.stats()

    def stop(self) -> None:
        """End the threads that compile grammars."""
        self._grammars.stop()
