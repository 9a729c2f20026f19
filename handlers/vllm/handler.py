"""The vllm handler: generates text under vLLM's own scheduler, in the worker's process or in processes of its own.

vLLM is imported when the model loads, never with this module. The directory `handlers/` itself must never be on
sys.path: `import vllm` would find this folder instead of the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from handlers.chats.required import call_constraint, is_forced
from handlers.generation.parameters import max_new_tokens, room_of
from handlers.structured_output.compiler import GrammarCache
from handlers.structured_output.limits import check_listed, check_style
from handlers.vllm.options import VllmEngineOptions
from handlers.vllm.requests.beam_search import Beam, search
from lmi_server.contract.errors import ModelLoadError, RequestError
from lmi_server.contract.generation import (
    BeamSearch,
    Delta,
    GenerationRequest,
    SamplingParameters,
    StructuredOutputs,
    TopToken,
    Usage,
)
from lmi_server.contract.handler import LLMHandler, ModelInfo
from lmi_server.contract.protocol import Adapter
from lmi_server.machine.environment import own_rank
from lmi_server.processes import model_imports

if TYPE_CHECKING:
    from handlers.vllm.engine.loading import LoadedEngine
    from handlers.vllm.requests.chats import RenderedRequest


# What is checked for vLLM's other libraries. The forms of grammars and tags differ between them.
_BOUNDED = frozenset({"json", "json_object", "regex", "choice"})
_MAX_LISTED = 2**16  # characters: vLLM's library takes a second for so many, of cores that all requests share


class VllmHandler(LLMHandler):
    """Serves a model directory, or a Hugging Face id, that vLLM can load."""

    def __init__(self) -> None:
        self._loaded: LoadedEngine
        self._own_grammars = True
        self._sleeps = False
        self._json_style: Mapping[str, bool] = {}
        # vLLM compiles without bounds: some schemas take all memory, or hold up all requests.
        self._grammars = GrammarCache(str)

    async def start(self, model_dir: str, options: VllmEngineOptions) -> ModelInfo:
        """Load the model in other threads: importing vLLM alone would hold up the worker's heartbeats for seconds."""
        engine = await asyncio.to_thread(import_engine, "engine.loading")
        loaded: LoadedEngine = await engine.load(model_dir, options)
        self._loaded, self._own_grammars, self._json_style = loaded, loaded.own_grammars, loaded.json_style
        # vLLM's other libraries know other keywords of JSON schemas than llguidance, which is only used for a trial of
        # their costs.
        judges = () if loaded.own_grammars else ("json", "json_object")
        self._grammars = GrammarCache(str, judges, options.max_json_whitespace)
        return loaded.info

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request."""
        if is_forced(request):
            request = call_constraint(request)
        request = msgspec.structs.replace(request, sampling=await self._constrain(request.sampling))
        if request.sampling.beams is not None:
            async with aclosing(self._search(request, request.sampling.beams)) as found:
                async for delta in found:
                    yield delta
            return
        loaded = self._loaded
        with loaded.adapters.using(request.adapter) as adapter:
            rendered = await self._render(request)
            builder, parser = loaded.delta_builder(request, rendered), rendered.parser
            deltas = loaded.driver.generate(rendered.prompt, builder, request.priority, adapter)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta if parser is None else parser.parse(delta)

    async def _constrain(self, sampling: SamplingParameters) -> SamplingParameters:
        """Return `sampling` with its constraint as vLLM takes it. Raises RequestError if it cannot be compiled."""
        constraint = sampling.structured_outputs
        if constraint is None or not (self._own_grammars or constraint.kind in _BOUNDED):
            return sampling
        if self._own_grammars:
            constraint = msgspec.structs.replace(constraint, **self._json_style)
        else:
            check_style(constraint)
        text = await self._grammars.get(constraint)
        check_listed(constraint, _MAX_LISTED)
        if not self._own_grammars:
            return sampling
        return msgspec.structs.replace(sampling, structured_outputs=StructuredOutputs(kind="grammar", value=text))

    async def _render(self, request: GenerationRequest) -> RenderedRequest:
        """Return `request` in vLLM's form. What vLLM's parser adds for strict tools becomes a grammar, or is left out.

        The forms of some families are none that a grammar here can have.
        """
        rendered = await self._loaded.prompts.render(request)
        added = rendered.sampling.structured_outputs
        if not self._own_grammars or added is None or added.kind != "structural_tag":
            return rendered
        sampling = msgspec.structs.replace(rendered.sampling, structured_outputs=request.sampling.structured_outputs)
        special = self._loaded.prompts.tokenizer.all_special_tokens
        # Free text with tags has no special tokens: a model could not write a marker that is one.
        if sampling.structured_outputs is None and not any(token in added.value for token in special):
            with contextlib.suppress(RequestError):
                sampling = await self._constrain(rendered.sampling)
        return dataclasses.replace(rendered, sampling=sampling)

    async def _search(self, request: GenerationRequest, beams: BeamSearch) -> AsyncGenerator[Delta, None]:
        """Yield a delta without text for each step of the search, then the whole sequence."""
        loaded, sampling = self._loaded, request.sampling
        prompt = await self.tokenize(request)
        granted = max_new_tokens(sampling, len(prompt), loaded.info.max_model_len)
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

        async with aclosing(search(beams, granted, ends, likeliest)) as steps:
            async for step in steps:
                best = step
                yield Delta("")  # it shows that the request makes progress
        tokens = tuple(
            msgspec.structs.replace(vocabulary.token(token.id), logprob=token.logprob) for token in best.tokens
        )
        text = vocabulary.decode([*prompt, *(token.id for token in tokens if not token.special)])
        usage = Usage(len(prompt), len(tokens), room=room_of(sampling, granted))
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

    async def sleep(self) -> None:
        """Have vLLM keep the weights on the host. Raises RequestError if it was not loaded for that."""
        if not self._loaded.may_sleep:
            raise RequestError(
                "vLLM keeps the weights where they are; set option.enable_sleep_mode=true, which takes a GPU and one"
                " rank, or POST /sleep?level=2, which ends the workers"
            )
        await self._loaded.driver.sleep()
        self._sleeps = True

    async def wake_up(self) -> None:
        if self._sleeps:
            await self._loaded.driver.wake_up()
            self._sleeps = False

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        if own_rank().directory:
            raise RequestError("the prefix cache of a model in several ranks cannot be reset; reload the model")
        return await self._loaded.driver.reset_prefix_cache(running, external)

    async def add_adapter(self, adapter: Adapter) -> None:
        if self._sleeps:
            raise RequestError("the model is asleep; POST /wake_up before it gets an adapter")
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
    model_imports.freeze_libraries()
    return imported
