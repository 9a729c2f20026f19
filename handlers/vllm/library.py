"""What the handlers take from vLLM, as names and as functions that hide its internal interfaces.

Of the other modules only `differences.py`, `compilation/stored_code.py`, `requests/media.py` and `engine/ranks.py`
import vLLM: a new version of vLLM changes these five. `interface.py` lists the members that all of them use.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import vllm
from prometheus_client import REGISTRY, generate_latest
from vllm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as ChatCompletionRequest
from vllm.entrypoints.pooling.factories import init_pooling_io_processors
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest as RerankRequest
from vllm.entrypoints.pooling.scoring.protocol import ScoreRequest as ScoreRequest
from vllm.entrypoints.pooling.typing import PoolingServeContext
from vllm.entrypoints.serve.engine.protocol import ErrorResponse as ErrorResponse
from vllm.exceptions import VLLMClientError as VLLMClientError
from vllm.exceptions import VLLMError as VLLMError
from vllm.lora.request import LoRARequest as LoRARequest
from vllm.model_executor.models import registry
from vllm.outputs import ScoringRequestOutput
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams as PoolingParams
from vllm.renderers import BaseRenderer as BaseRenderer
from vllm.renderers import ChatParams as ChatParams
from vllm.renderers import TokenizeParams as TokenizeParams
from vllm.renderers.online_renderer import OnlineRenderer as OnlineRenderer
from vllm.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
from vllm.sampling_params import RequestOutputKind as RequestOutputKind
from vllm.sampling_params import SamplingParams as SamplingParams
from vllm.sampling_params import StructuredOutputsParams as StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError as EngineGenerateError
from vllm.v1.engine.llm_engine import LLMEngine as LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase as StatLoggerBase
from vllm.v1.serial_utils import MsgpackDecoder as MsgpackDecoder
from vllm.v1.serial_utils import MsgpackEncoder as MsgpackEncoder

from handlers.vllm.differences import ChatTemplateConfig
from handlers.vllm.interface import check_version
from lmi_server.contract.generation import StructuredOutputs

logger = logging.getLogger(__name__)

# Fields of a pooling request that belong to its prompt.
_PROMPT_EXTRAS = ("mm_processor_kwargs", "cache_salt", "chat_template_kwargs")
SHORT = 2  # tokens


def refuse_unknown_interface() -> None:
    """Log a warning if this handler was not tested with the installed version of vLLM.

    Raises ModelLoadError if that version lacks what the handler uses.
    """
    warning = check_version(version())
    if warning is not None:
        logger.warning(warning)


def version() -> str:
    return str(vllm.__version__)


def inspect_models_in_this_process() -> None:
    """Have vLLM look at the class of a model in this process. The process for that imports all of vLLM.

    A process of its own keeps CUDA from being initialized in this one; a machine without a GPU needs none. vLLM stores
    what it saw below VLLM_CACHE_ROOT, but in a new container nothing is stored yet.
    """
    registry._run_in_subprocess = lambda inspect: inspect()


def in_process_engine(config: Any, loggers: list[Callable[..., Any]]) -> LLMEngine:
    """Return an engine whose core runs in this process; each call of `step` computes one step."""
    return with_own_tokenizer(LLMEngine.from_vllm_config(config, stat_loggers=loggers))


def short_request() -> tuple[Any, SamplingParams]:
    """Return a prompt of a few tokens, and the parameters to generate as many."""
    parameters = SamplingParams(max_tokens=SHORT, ignore_eos=True, temperature=0.0, detokenize=False)
    return {"prompt_token_ids": list(range(SHORT))}, parameters


@contextmanager
def without_metrics(engine: LLMEngine) -> Iterator[None]:
    """Keep the steps of `engine` out of vLLM's metrics."""
    manager, engine.logger_manager = engine.logger_manager, None
    try:
        yield
    finally:
        engine.logger_manager = manager


def with_own_tokenizer(engine: LLMEngine) -> LLMEngine:
    """Give the detokenizer of `engine` a copy of the tokenizer, and return `engine`.

    The event loop's thread encodes prompts while the step loop's thread decodes outputs. A fast tokenizer is not safe
    for that: to encode, transformers may change its truncation and padding, which fails ("Already borrowed") while
    another thread uses it.
    """
    engine.output_processor.tokenizer = copy.deepcopy(engine.output_processor.tokenizer)
    return engine


def own_process_engine(config: Any, loggers: list[Callable[..., Any]]) -> AsyncLLM:
    """Return an engine whose core runs in a process of its own."""
    return AsyncLLM.from_vllm_config(config, stat_loggers=loggers)


def pooling_processors(tasks: Any, config: Any, renderer: BaseRenderer) -> Mapping[str, Any]:
    """Return vLLM's processors by name; each makes prompts from pooling requests, and results from their outputs."""
    processors: Mapping[str, Any] = init_pooling_io_processors(tasks, config, renderer, ChatTemplateConfig())
    return processors


def pooling_context(request: Any, processor: Any) -> PoolingServeContext[Any]:
    """Return the state that a processor keeps for one request while it runs."""
    extras = {name: value for name in _PROMPT_EXTRAS if (value := getattr(request, name, None)) is not None}
    return PoolingServeContext(
        request=request,
        model_name="",
        request_id="",
        pooling_params=processor.create_pooling_params(request),
        lora_request=None,
        priorities=0,
        prompt_extras=extras,
    )


def score_of(output: Any) -> float:
    """Return the score in an output that a processor has made of the engine's."""
    return float(ScoringRequestOutput.from_base(output).outputs.score)


def keep_adapters_apart() -> None:
    """Fix vLLM's LoRA kernels for the CPU, which apply the last adapter to requests without one before 0.33.

    Rows of such requests have the adapter index -1, and the kernels index the stacked weights with it: torch takes -1
    for the last. An update is the product of two matrices (shrink, then expand); setting the rows to zero after the
    first makes the whole update zero.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[: len(indices)][indices < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


def on_lost_worker(engine: LLMEngine, callback: Callable[[], None]) -> None:
    """Call `callback` when a process dies that computes a part of the model; the call may come from any thread."""
    engine.model_executor.register_failure_callback(callback)


def is_dead(engine: AsyncLLM) -> bool:
    """Return whether the engine's processes have ended."""
    return bool(engine.engine_core.resources.engine_dead)


def is_on_cpu() -> bool:
    return bool(current_platform.is_cpu())


def own_metrics() -> bytes:
    """Return vLLM's metrics in Prometheus' text format.

    The registry is global and also holds metrics of the Python process, which the front end has already.
    """
    names = [name for name in REGISTRY._names_to_collectors if name.startswith("vllm:")]
    return generate_latest(REGISTRY.restricted_registry(names)) if names else b""


def silence_default_statistics() -> None:
    """Keep vLLM from logging its own line of statistics; `statistics.py` logs one."""
    logging.getLogger("vllm.v1.metrics.loggers").setLevel(logging.WARNING)


def kv_cache_tokens(config: Any) -> int:
    """Return the number of tokens that the KV cache of a loaded engine holds."""
    return int(config.cache_config.num_gpu_blocks or 0) * int(config.cache_config.block_size)


def min_kv_bytes(config: Any) -> int:
    """Return bytes of KV cache that vLLM accepts as enough for one request.

    Twice the request's own need, because vLLM reserves a few blocks.
    """
    return 2 * int(config.model_config.max_model_len) * bytes_per_token(config)


def bytes_per_token(config: Any) -> int:
    """Return the bytes of KV cache per token, on the assumption that all layers of the model are attention."""
    model, parallel = config.model_config, config.parallel_config
    per_layer = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    return int(model.get_num_layers(parallel) * per_layer)


def structured_outputs(constraint: StructuredOutputs) -> StructuredOutputsParams:
    """Return a constraint on the output in vLLM's form. Raises vLLM's own error if vLLM refuses it."""
    return StructuredOutputsParams(
        **{constraint.kind: constraint.value},
        whitespace_pattern=constraint.whitespace_pattern,
        disable_any_whitespace=constraint.disable_any_whitespace,
        disable_additional_properties=constraint.disable_additional_properties,
    )


def compiles_own_grammars(config: Any, tokenizer: Any, others: bool) -> bool:
    """Return whether vLLM compiles constraints with llguidance, in whose form `handlers/structured_output` writes them.

    It is chosen here unless `others`: the options say otherwise. vLLM's own choice for JSON, xgrammar, ignores some
    keywords without a word. gpt-oss writes its answers between tokens that llguidance's texts do not have.
    """
    chosen = config.structured_outputs_config
    harmony = config.model_config.hf_config.model_type == "gpt_oss"
    # llguidance reads transformers' fast tokenizers and Mistral's newer ones.
    readable = getattr(tokenizer, "backend_tokenizer", None) is not None or getattr(tokenizer, "is_tekken", False)
    if readable and not others and not harmony:
        chosen.backend = "guidance"
    return bool(chosen.backend == "guidance")


def json_style(config: Any) -> Mapping[str, bool]:
    """Return how the configuration has all constrained JSON written, by the names of StructuredOutputs."""
    chosen = config.structured_outputs_config
    names = ("disable_any_whitespace", "disable_additional_properties")
    return {name: True for name in names if getattr(chosen, name)}


def limits_reasoning(config: Any) -> bool:
    """Return whether vLLM knows the markers around the model's reasoning, and so can end it after some tokens."""
    return config.reasoning_config is not None and bool(config.reasoning_config.enabled)


def end_tokens(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a sequence: those of generation_config.json, and the tokenizer's."""
    configured = config.model_config.try_get_generation_config().get("eos_token_id")
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*several, tokenizer.eos_token_id) if token is not None)


def default_sampling(config: Any) -> Mapping[str, Any]:
    """Return the sampling parameters in the model's generation_config.json, by the names of SamplingParameters."""
    names = {"max_tokens": "max_new_tokens"}
    return {names.get(name, name): value for name, value in config.model_config.get_diff_sampling_param().items()}
