"""Everything that is taken from vLLM: what depends on its version (0.32 and 0.33) is settled here and nowhere else."""

from __future__ import annotations

import copy
import logging
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
import vllm.envs as envs
from prometheus_client import REGISTRY, generate_latest
from vllm.compilation import decorators
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.pooling.factories import init_pooling_io_processors
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.entrypoints.pooling.typing import PoolingServeContext
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError, VLLMError
from vllm.lora.request import LoRARequest
from vllm.outputs import ScoringRequestOutput
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer, ChatParams, TokenizeParams
from vllm.renderers.chat_utils import ChatTemplateConfig, make_tool_call_id
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lmi_server.contract.generation import StructuredOutputs
from lmi_server.machine.environment import meeting_point, own_rank

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "BaseRenderer",
    "ChatCompletionRequest",
    "ChatParams",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineGenerateError",
    "ErrorResponse",
    "FlexibleArgumentParser",
    "LLMEngine",
    "LoRARequest",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "OnlineRenderer",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "RerankRequest",
    "SamplingParams",
    "ScoreRequest",
    "StatLoggerBase",
    "StructuredOutputsParams",
    "TokenizeParams",
    "VLLMClientError",
    "VLLMError",
    "make_tool_call_id",
]

_log = logging.getLogger(__name__)

_PROMPT_EXTRAS = ("mm_processor_kwargs", "cache_salt", "chat_template_kwargs")
_SHARED_MEMORY = Path("/dev/shm")
KNOWN_VERSIONS = ("0.32", "0.33")


def warn_of_unknown_version() -> None:
    """Log where the installed vLLM is none that this handler was made for."""
    if vllm.__version__.rpartition(".")[0] not in KNOWN_VERSIONS:
        known = " and ".join(KNOWN_VERSIONS)
        _log.warning("vLLM %s is installed; the handler was made for %s", vllm.__version__, known)


def version() -> str:
    return str(vllm.__version__)


def in_process_engine(config: Any, loggers: list[Callable[..., Any]]) -> LLMEngine:
    """Return an engine whose core runs in this process and steps when it is told to.

    Its output side has a tokenizer of its own: the requests' texts are encoded in another thread, and a tokenizer must
    not be set up for encoding while it decodes.
    """
    return _with_own_tokenizer(LLMEngine.from_vllm_config(config, stat_loggers=loggers))


def _with_own_tokenizer(engine: LLMEngine) -> LLMEngine:
    engine.output_processor.tokenizer = copy.deepcopy(engine.output_processor.tokenizer)
    return engine


class UncompiledModel:
    """A model that runs its own code because none is stored that vLLM compiled for it; `path` is where that will be."""

    def __init__(self, module: Any, path: Path) -> None:
        self.path = path
        self._module = module

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._module.parameters())

    def use_compiled(self) -> bool:
        """Run the stored code from the next step on. Returns False where there is none that can be used."""
        compiled = _stored_code(self._module, self.path)
        if compiled is not None:
            self._module.aot_compiled_fn = compiled
        return compiled is not None


def use_stored_code(config: Any) -> None:
    """Let the models of `config` that this process loads run the code that vLLM once compiled for them.

    0.32 stores compiled code and fails to load it again on the CPU, where its compiler's functions lack a method.
    """
    _configure_code(config)
    _load_code_by(lambda module, path: _stored_code(module, Path(path)))


def serve_before_compiled(config: Any) -> list[UncompiledModel]:
    """Let the models of `config` that this process loads run their own code where no compiled code of them is stored.

    Returns a list that those models will be in.
    """
    _configure_code(config)
    found: list[UncompiledModel] = []

    def stored_or_own(module: Any, path: str) -> Callable[..., Any]:
        compiled = _stored_code(module, Path(path))
        if compiled is not None:
            return compiled
        found.append(UncompiledModel(module, Path(path)))
        return type(module).forward  # type: ignore[no-any-return]

    if not _load_code_by(stored_or_own):
        return found
    compile_nothing()
    return found


def compile_nothing() -> None:
    """Keep this process from compiling the sampler's functions on first use, seconds in the middle of a request."""
    torch._dynamo.config.disable = True


def _load_code_by(load: Callable[[Any, str], Callable[..., Any] | None]) -> bool:
    """Have vLLM ask `load` for the compiled code of a model, and compile where there is none; False where it cannot."""
    name = "_try_load_aot_compiled_fn"
    if not hasattr(decorators, name) or not envs.VLLM_USE_AOT_COMPILE or envs.VLLM_DISABLE_COMPILE_CACHE:
        _log.warning("vLLM %s keeps no compiled code here, or in a way that is not known; it compiles now", version())
        return False
    setattr(decorators, name, load)
    return True


def _stored_code(module: Any, path: Path) -> Callable[..., Any] | None:
    if not path.exists():
        return None
    # The border to whatever an older version has stored.
    try:
        with set_current_vllm_config(module.vllm_config), path.open("rb") as file:
            compiled = torch.compiler.load_compiled_function(file, f_globals=module.forward.__globals__)
        decorators._verify_source_unchanged(compiled.source_info(), module.vllm_config)
    except Exception as error:  # noqa: BLE001
        _log.warning("the compiled code in %s cannot be used: %s", path, error)
        return None
    if not module.compilation_config.dynamic_shapes_config.evaluate_guards:
        compiled.disable_guard_check()
    return compiled  # type: ignore[no-any-return]


def can_keep_code() -> bool:
    """Tell whether compiled code can be written where vLLM keeps it; without that, no model can be compiled at all."""
    directory = Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError as error:
        _log.warning("the model runs uncompiled, VLLM_CACHE_ROOT cannot be written: %s", error)
        return False


def _configure_code(config: Any) -> None:
    """Have models use vLLM's kernels, in whose place it leaves plain code to its compiler, and tell CPUs apart.

    A model's own code needs the kernels, compiled code is as fast either way, and both are to be of one configuration.
    Compiled code is for one kind of CPU, of which the name under which it is stored would not tell.
    """
    compilation = config.compilation_config
    compilation.custom_ops = ["all" if name == "none" else name for name in compilation.custom_ops]
    if isinstance(config.additional_config, dict):
        config.additional_config = {**config.additional_config, "cpu": _kind_of_cpu()}


def _kind_of_cpu() -> str:
    """Return the instruction sets of this machine's first core."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags.partition(':')[2].strip()}"


def compile_models(arguments: Mapping[str, Any]) -> None:
    """Compile the models of an engine that is served by `serve_before_compiled`, and store their code.

    `arguments` are those of the engine. The code is found again under a name that hashes the configuration and the
    environment, into which vLLM writes as it makes the configuration.
    """
    config = AsyncEngineArgs(**arguments).create_engine_config()
    use_stored_code(config)
    config.cache_config.kv_cache_memory_bytes = least_kv_bytes(config)
    in_process_engine(config, [])


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """Computes the part of one rank of an MPI group.

    vLLM names its shared memory on the CPU after the place where the ranks meet; env://, its own choice, would be one
    name for all groups of a machine.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        rank = own_rank().rank
        return meeting_point(), rank, rank


def leading_engine(config: Any, loggers: list[Callable[..., Any]]) -> LLMEngine:
    """Return an engine as `in_process_engine` does, on the first rank of an MPI group."""
    engine = LLMEngine(config, RankExecutor, log_stats=True, stat_loggers=loggers)
    _unname_shared_memory()
    return _with_own_tokenizer(engine)


def following_core(config: Any) -> InprocClient:
    """Return an engine core alone, in this process: what a rank beside the first has."""
    core = InprocClient(config, RankExecutor, log_stats=False)
    _unname_shared_memory()
    return core


def _unname_shared_memory() -> None:
    """Take the names off the memory that the ranks share, which all have mapped: it goes with the last of them.

    vLLM takes off one of them where it ends well, and the other never.
    """
    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False
    port = meeting_point().rpartition(":")[2]
    for path in _SHARED_MEMORY.glob(f"{port}-*-cpushm_*"):
        path.unlink(missing_ok=True)


def own_process_engine(config: Any, loggers: list[Callable[..., Any]]) -> AsyncLLM:
    """Return an engine whose core runs in a process of its own; to be called on the event loop."""
    return AsyncLLM.from_vllm_config(config, stat_loggers=loggers)


def pooling_processors(tasks: Any, config: Any, renderer: BaseRenderer) -> Mapping[str, Any]:
    """Return what makes prompts of pooling requests and results of outputs, by vLLM's name of the way."""
    processors: Mapping[str, Any] = init_pooling_io_processors(tasks, config, renderer, ChatTemplateConfig())
    return processors


def pooling_context(request: Any, processor: Any) -> PoolingServeContext[Any]:
    """Return what a processor keeps of one request while it is served."""
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
    """Return the score in an output that a processor has made."""
    return float(ScoringRequestOutput.from_base(output).outputs.score)


def keep_adapters_apart() -> None:
    """Let the CPU kernels of LoRA leave requests without an adapter alone, which 0.32 gives the last adapter's update.

    The index -1 of their rows means no adapter, and the kernels take it for the last one. Rows that are zero after the
    first of the two products stay so.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[: len(indices)][indices < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


def on_lost_worker(engine: LLMEngine, callback: Callable[[], None]) -> None:
    """Have `callback` called, from any thread, once a process dies that has a part of the model of `engine`."""
    engine.model_executor.register_failure_callback(callback)


def is_dead(engine: AsyncLLM) -> bool:
    """Tell whether the engine's processes have ended."""
    return bool(engine.engine_core.resources.engine_dead)


def is_on_cpu() -> bool:
    return bool(current_platform.is_cpu())


def own_metrics() -> bytes:
    """Return vLLM's metrics in Prometheus' text format, without those of the Python process in the same registry."""
    names = [name for name in REGISTRY._names_to_collectors if name.startswith("vllm:")]
    return generate_latest(REGISTRY.restricted_registry(names)) if names else b""


def silence_default_statistics() -> None:
    """Keep vLLM from logging its own statistics line beside ours."""
    logging.getLogger("vllm.v1.metrics.loggers").setLevel(logging.WARNING)


def kv_cache_tokens(config: Any) -> int:
    """Return how many tokens the KV cache of a loaded engine holds."""
    return int(config.cache_config.num_gpu_blocks or 0) * int(config.cache_config.block_size)


def least_kv_bytes(config: Any) -> int:
    """Return the bytes of KV cache that vLLM surely takes: it counts a few blocks for itself."""
    return 2 * int(config.model_config.max_model_len) * bytes_per_token(config)


def bytes_per_token(config: Any) -> int:
    """Estimate the bytes of KV cache that a token takes, for a model whose layers are all attention."""
    model, parallel = config.model_config, config.parallel_config
    per_layer = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    return int(model.get_num_layers(parallel) * per_layer)


def structured_outputs(wanted: StructuredOutputs) -> StructuredOutputsParams:
    """Return a constraint in vLLM's form. Raises vLLM's error where it refuses it."""
    return StructuredOutputsParams(
        **{wanted.kind: wanted.value},
        whitespace_pattern=wanted.whitespace_pattern,
        disable_any_whitespace=wanted.disable_any_whitespace,
        disable_additional_properties=wanted.disable_additional_properties,
    )


def default_sampling(config: Any) -> Mapping[str, Any]:
    """Return what the model's generation_config.json says of sampling, by the names of SamplingParameters."""
    names = {"max_tokens": "max_new_tokens"}
    return {names.get(name, name): value for name, value in config.model_config.get_diff_sampling_param().items()}
