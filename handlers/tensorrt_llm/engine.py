"""Loads a model with TensorRT-LLM, and runs requests on it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from handlers.checkpoints.saving import saving
from handlers.generation.prompts import PromptEncoder
from handlers.tensorrt_llm import library
from handlers.tensorrt_llm.adapters import Adapters
from handlers.tensorrt_llm.checkpoint import Checkpoint, find
from handlers.tensorrt_llm.options import ENGINE_REPOSITORY, TensorRtLlmOptions
from handlers.tensorrt_llm.outputs import DeltaBuilder, Vocabulary
from handlers.tensorrt_llm.requests import CACHE_SALT, CLIENT_ERRORS, RequestLimits, sampling_params
from handlers.tensorrt_llm.statistics import Statistics
from lmi_server.contract.errors import HandlerError, ModelLoadError, ModelMemoryError, RequestError, describe
from lmi_server.contract.generation import Delta, Feature, GenerationRequest, SamplingParameters
from lmi_server.contract.handler import ModelInfo

logger = logging.getLogger("handlers.tensorrt_llm.handler")

_FEATURES: frozenset[Feature] = frozenset(
    {"structured_outputs", "min_tokens", "bad_words", "allowed_token_ids", "beam_search", "engine_extras"}
)
_PROGRESS_S = 30.0  # between two lines of the log while the engine is built
_LIVENESS_INTERVAL_S = 1.0
_ONE_TOKEN = SamplingParameters(max_new_tokens=1)


class Engine:
    """A running engine, and what its requests need."""

    def __init__(self, llm: Any, checkpoint: Checkpoint, options: TensorRtLlmOptions) -> None:
        tokenizer = library.tokenizer(llm)
        if tokenizer is None:
            raise ModelLoadError(
                "TensorRT-LLM loaded no tokenizer, which prompts need; remove option.skip_tokenizer_init, or set"
                " option.tokenizer"
            )
        self._llm = llm
        max_seq_len = self._max_seq_len = library.max_seq_len(llm) or options.context_length() or 0
        max_input_len = max_seq_len if checkpoint.built else options.max_input_len
        keeps_logits = options.gather_generation_logits or options.runs_on == "pytorch"
        self._limits = RequestLimits(max_seq_len, max_input_len, len(tokenizer), keeps_logits, options)
        self._vocabulary = Vocabulary(tokenizer.decode, tokenizer.all_special_ids)
        self.max_seq_len = max_seq_len
        self.prompts = PromptEncoder(tokenizer)
        self.adapters = Adapters(options, self._try_adapter)
        self.statistics = Statistics()
        self.statistics.start(lambda timeout_s: library.statistics(llm, timeout_s))
        self._watch = asyncio.create_task(self._end_with_engine())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a request; closing the generator aborts it.

        Raises RequestError if the request cannot be served as sent, HandlerError if the engine gives it up.
        """
        adapter = self.adapters.find(request.adapter)
        ids, text = await self.prompts.encode(request, self._max_seq_len)
        room = self._limits.room(len(ids), request.sampling)
        parameters = sampling_params(request.sampling, room, self._limits)
        builder = DeltaBuilder(request.sampling, ids, text, room, self._vocabulary)
        # Not one result at the end, also if the answer does not stream: the queue gives up a request that shows no
        # progress. TensorRT-LLM cannot stream a search with beams.
        streams = request.sampling.beams is None
        salt = request.sampling.extra.get(CACHE_SALT)
        self.statistics.prompt_tokens += len(ids)
        result = self._submit(ids, parameters, adapter, streams, salt)
        self.statistics.running += 1
        try:
            async with aclosing(self._deltas(result, builder, streams)) as deltas:
                async for delta in deltas:
                    self.statistics.generated_tokens += len(delta.tokens)
                    yield delta
        finally:
            self.statistics.running -= 1
            if not result.finished:
                result.abort()

    async def count(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of a request's text or chat."""
        return await self.prompts.count(request, self._max_seq_len)

    async def _deltas(self, result: Any, builder: DeltaBuilder, streams: bool) -> AsyncGenerator[Delta, None]:
        with self._engine_errors():
            if not streams:
                await result.aresult()
                yield builder.build(result)
                return
            async for step in result:
                yield builder.build(step)

    def _submit(self, ids: list[int], parameters: Any, adapter: Any, streams: bool, salt: str | None) -> Any:
        """Give a request to the engine. Raises RequestError if TensorRT-LLM refuses it."""
        more = {} if salt is None else {CACHE_SALT: salt}
        with self._engine_errors():
            try:
                return self._llm.generate_async(
                    {"prompt_token_ids": ids}, parameters, lora_request=adapter, streaming=streams, **more
                )
            except CLIENT_ERRORS as error:
                raise RequestError(f"TensorRT-LLM refuses the request: {error}") from error

    @contextmanager
    def _engine_errors(self) -> Iterator[None]:
        """Raise what TensorRT-LLM raises as an error of the request; end the process if the engine is dead."""
        try:
            yield
        except library.RequestError as error:
            raise HandlerError(f"TensorRT-LLM could not generate: {error}") from error
        except library.CppExecutorError as error:
            _end_process(describe(error))
        except RuntimeError as error:
            if library.is_dead(self._llm):
                _end_process(describe(error))
            raise HandlerError(f"TensorRT-LLM could not generate: {error}") from error

    async def _try_adapter(self, adapter: library.LoRARequest) -> None:
        """Generate one token with an adapter, so that the engine reads its weights. Raises RequestError."""
        parameters = sampling_params(_ONE_TOKEN, 1, self._limits)
        result = self._submit(self.prompts.tokenize("a"), parameters, adapter, streams=False, salt=None)
        with self._engine_errors():
            await result.aresult()

    async def _end_with_engine(self) -> None:
        """End this process soon after the engine's, even if no request runs that would notice."""
        while not library.is_dead(self._llm):  # noqa: ASYNC110 - TensorRT-LLM offers nothing to wait for
            await asyncio.sleep(_LIVENESS_INTERVAL_S)
        _end_process("it was shut down")

    async def stop(self) -> None:
        self._watch.cancel()
        self.statistics.stop()
        await asyncio.to_thread(self._llm.shutdown)


async def load(model_dir: str, options: TensorRtLlmOptions) -> tuple[Engine, ModelInfo]:
    """Load a model, and save its engine if option.save_mp_checkpoint_path asks for it. Raises ModelLoadError."""
    began = time.perf_counter()
    checkpoint = find(model_dir, options)
    logger.info("TensorRT-LLM %s: %s", library.version(), _plan(checkpoint, options))
    llm = await _with_progress(checkpoint, options)
    async with AsyncExitStack() as ranks:  # they end with a load that fails
        ranks.push_async_callback(asyncio.to_thread, llm.shutdown)
        if options.save_mp_checkpoint_path is not None:
            await _save(llm, Path(options.save_mp_checkpoint_path))
        engine = Engine(llm, checkpoint, options)
        ranks.pop_all()
    details = {
        "engine": f"TensorRT-LLM {library.version()}",
        "backend": options.runs_on,
        "built_before": checkpoint.built,
        "max_rolling_batch_size": options.max_running(),
        "load_seconds": round(time.perf_counter() - began, 1),
    }
    return engine, ModelInfo(max_model_len=engine.max_seq_len, features=_FEATURES, details=details)


def _plan(checkpoint: Checkpoint, options: TensorRtLlmOptions) -> str:
    place = checkpoint.arguments["model"]
    if checkpoint.built:
        return f"loads the engine in {place}; keys that an engine is built with have no effect on it"
    if options.runs_on == "pytorch":
        return f"loads {place} on PyTorch"
    algorithm = checkpoint.arguments.get("quant_config", {}).get("quant_algo")
    quantizes = "" if algorithm is None else f", quantises it ({algorithm})"
    return f"converts {place}{quantizes} and builds an engine, which takes minutes"


async def _with_progress(checkpoint: Checkpoint, options: TensorRtLlmOptions) -> Any:
    """Return the running engine. It loads in another thread, so that the worker's heartbeats go on."""
    began = time.perf_counter()
    loading = asyncio.ensure_future(asyncio.to_thread(_make_llm, checkpoint, options))
    while not (await asyncio.wait({loading}, timeout=_PROGRESS_S))[0]:
        logger.info("TensorRT-LLM still loads the model, for %.0f seconds so far", time.perf_counter() - began)
    return loading.result()


def _make_llm(checkpoint: Checkpoint, options: TensorRtLlmOptions) -> Any:
    try:
        return library.make_llm(options.runs_on, checkpoint.arguments)
    except ModelLoadError:
        raise
    # The border to TensorRT-LLM: the load fails with its message, whatever its class is.
    except Exception as error:
        message = f"TensorRT-LLM cannot load the model: {describe(error)}"
        raise (ModelMemoryError if "out of memory" in message.lower() else ModelLoadError)(message) from error
    finally:
        checkpoint.close()


async def _save(llm: Any, target: Path) -> None:
    repository = target / ENGINE_REPOSITORY
    with saving(target):
        repository.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(llm.save, str(repository))
    logger.info("saved the engine to %s", repository)


def _end_process(reason: str) -> NoReturn:
    """End this process at once. The front end sees its link close, and retries or fails the requests that it had.

    The ranks of TensorRT-LLM are children of this process; the supervisor ends them with it.
    """
    logger.critical("TensorRT-LLM's engine died (%s); this worker ends, and a new one takes over", reason)
    logging.shutdown()
    os._exit(1)
