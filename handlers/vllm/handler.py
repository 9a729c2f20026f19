"""The vllm handler: generates text under vLLM's own scheduler, in the worker's process or in processes of its own.

vLLM is imported when the model loads, never with this module. The directory `handlers/` itself must never be on
sys.path: `import vllm` would find this folder instead of the library.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from handlers.structured_output.compiler import GrammarCache
from handlers.structured_output.limits import check_listed
from handlers.vllm.beam_search import Beam, search
from handlers.vllm.options import VllmEngineOptions
from lmi_server.contract.errors import ContextLengthError, ModelLoadError
from lmi_server.contract.generation import (
    BeamSearch,
    Delta,
    GenerationRequest,
    SamplingParameters,
    TopToken,
    Usage,
)
from lmi_server.contract.handler import LLMHandler, ModelInfo
from lmi_server.contract.protocol import Adapter
from lmi_server.machine import model_imports

if TYPE_CHECKING:
    from handlers.vllm.engine import LoadedEngine


# The forms of grammars and tags differ between the libraries.
_BOUNDED = frozenset({"json", "json_object", "regex", "choice"})
_MOST_LISTED = 2**16  # characters, which take vLLM's library a second of the cores that all requests share


class VllmHandler(LLMHandler):
    """Serves a model directory, or a Hugging Face id, that vLLM can load."""

    def __init__(self) -> None:
        self._loaded: LoadedEngine
        # vLLM compiles without bounds: some schemas take all memory, or hold up all requests. Its libraries know other
        # keywords of JSON schemas than llguidance, which only tries here what a constraint costs.
        self._grammars = GrammarCache(str, engine_judges=("json", "json_object"))

    async def start(self, model_dir: str, options: VllmEngineOptions) -> ModelInfo:
        """Load the model in other threads: importing vLLM alone would hold up the worker's heartbeats for seconds."""
        engine = await asyncio.to_thread(import_engine, "engine")
        loaded: LoadedEngine = await engine.load(model_dir, options)
        self._loaded = loaded
        return loaded.info

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request."""
        constraint = request.sampling.structured_outputs
        if constraint is not None and constraint.kind in _BOUNDED:
            await self._grammars.get(constraint)
            check_listed(constraint, _MOST_LISTED)
        if request.sampling.beams is not None:
            async with aclosing(self._search(request, request.sampling.beams)) as found:
                async for delta in found:
                    yield delta
            return
        loaded = self._loaded
        with loaded.adapters.using(request.adapter) as adapter:
            rendered = await loaded.prompts.render(request)
            builder, parser = loaded.delta_builder(request, rendered), rendered.parser
            deltas = loaded.driver.generate(rendered.prompt, builder, request.priority, adapter)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta if parser is None else parser.parse(delta)

    async def _search(self, request: GenerationRequest, beams: BeamSearch) -> AsyncGenerator[Delta, None]:
        """Yield a delta without text for each step of the search, then the whole sequence."""
        loaded, sampling = self._loaded, request.sampling
        prompt = await self.tokenize(request)
        room = loaded.info.max_model_len - len(prompt)
        asked = sampling.max_new_tokens or room
        if room < 1 or (asked > room and not sampling.fit_context):
            raise ContextLengthError.of(len(prompt), asked, loaded.info.max_model_len)
        vocabulary = loaded.vocabulary
        before = vocabulary.decode(prompt)
        yield Delta("", prompt_text=before, prompt_token_ids=prompt)
        best, ends = Beam(), frozenset() if sampling.ignore_eos else loaded.ends

        async def likeliest(new: Sequence[int], count: int) -> Sequence[TopToken]:
            one_more = GenerationRequest(
                request_id=request.request_id,
                prompt=(*prompt, *new),
                sampling=SamplingParameters(max_new_tokens=1, logprobs=count, ignore_eos=True),
                add_special_tokens=False,
                priority=request.priority,
                adapter=request.adapter,
            )
            async with aclosing(self.generate(one_more)) as deltas:
                return [top async for delta in deltas for token in delta.tokens for top in token.top]

        async with aclosing(search(beams, min(asked, room), ends, likeliest)) as steps:
            async for step in steps:
                best = step
                yield Delta("")  # it shows that the request makes progress
        tokens = tuple(
            msgspec.structs.replace(vocabulary.token(token.id), logprob=token.logprob) for token in best.tokens
        )
        text = vocabulary.decode([*prompt, *(token.id for token in tokens if not token.special)])
        usage = Usage(len(prompt), len(tokens), room=room if asked > room else None)
        yield Delta(text.removeprefix(before), tokens, "eos_token" if best.ended else "length", usage)

    async def tokenize(self, request: GenerationRequest) -> list[int]:
        return list((await self._loaded.prompts.render(request)).prompt["prompt_token_ids"])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._loaded.prompts.detokenize(list(tokens))

    def tokenizer(self) -> Any:
        return self._loaded.prompts.tokenizer

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._loaded.adapters.registered

    async def add_adapter(self, adapter: Adapter) -> None:
        await self._loaded.adapters.add(adapter)

    async def remove_adapter(self, name: str) -> None:
        await self._loaded.adapters.remove(name)

    def metrics(self) -> bytes:
        return self._loaded.statistics.exposition()

    def stats(self) -> Mapping[str, float]:
        return self._loaded.statistics.gauges(self._loaded.driver.unfinished)

    async def stop(self) -> None:
        self._grammars.stop()
        await self._loaded.driver.stop()


def import_engine(module: str) -> ModuleType:
    """Import a module of this folder that imports vLLM. Raises ModelLoadError if vLLM cannot be imported."""
    try:
        imported = import_module(f"handlers.vllm.{module}")
    except ImportError as error:
        raise ModelLoadError(
            f"the vllm handler needs vLLM ({error}); install vllm, or lmi-server[vllm] on a machine without GPU"
        ) from error
    model_imports.imported()
    return imported
