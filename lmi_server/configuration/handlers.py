"""The table of handlers: which `option.entryPoint` means which class. Adding an engine adds one row.

Rows are strings, so that an engine that is not installed costs nothing and the server process never imports one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from lmi_server.configuration.options import ModelOptions


@dataclass(frozen=True, slots=True)
class HandlerRow:
    """One handler: its `title` in words, the `names` under which entryPoint asks for it, and the class of its options.

    `handler` and `options` are "module:Class"; the module of `options` is importable without the engine. `handler` is
    None where this version has only the options: such a configuration is resolved and checked, and not served.
    `rolling_batches` are the values of option.rolling_batch that mean this handler; `engines` the Python packages that
    it needs. `causal_lm_only`: it generates text with a causal language model and serves no other architecture.
    `answers_tasks`: its requests are whole tasks of a Hugging Face model, in static batches.
    `reads_checkpoint`: the model is a Hugging Face checkpoint. `batches_by_default`: with a rolling batch where nobody
    says otherwise. `takes_batches`: option.batch_size may be more than 1. `takes_all_gpus`: it splits the model over
    all of them where nobody says otherwise. `needs_mpi`: it runs under the MPI engine only.
    """

    title: str
    names: tuple[str, ...]
    options: str
    handler: str | None = None
    rolling_batches: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    causal_lm_only: bool = False
    answers_tasks: bool = False
    reads_checkpoint: bool = False
    batches_by_default: bool = False
    takes_batches: bool = False
    takes_all_gpus: bool = False
    needs_mpi: bool = False

    @property
    def formats_text(self) -> bool:
        """Tell whether its answers are texts of the dialects, which option.output_formatter gives their form."""
        return self.handler is not None and not self.takes_batches


_HUGGING_FACE = HandlerRow(
    title="huggingface",
    names=("djl_python.huggingface", "huggingface"),
    handler="handlers.huggingface.handler:HuggingFaceHandler",
    options="handlers.huggingface.options:HuggingFaceOptions",
    rolling_batches=("scheduler",),
    engines=("transformers", "torch"),
    causal_lm_only=True,
    reads_checkpoint=True,
    batches_by_default=True,
)
# Named by no entry point of its own: djl_python.huggingface means it for a task that the rolling batch is not for.
PIPELINE = HandlerRow(
    title="huggingface pipeline",
    names=(),
    handler="handlers.tasks.handler:PipelineHandler",
    options="handlers.tasks.options:PipelineOptions",
    engines=("transformers", "torch"),
    answers_tasks=True,
    reads_checkpoint=True,
    takes_batches=True,
)
DEEPSPEED = HandlerRow(
    title="deepspeed",
    names=("djl_python.deepspeed", "deepspeed"),
    handler="handlers.deepspeed.handler:DeepSpeedHandler",
    options="handlers.deepspeed.options:DeepSpeedOptions",
    rolling_batches=("deepspeed",),
    engines=("deepspeed",),
    causal_lm_only=True,
    reads_checkpoint=True,
)
# djl_python.deepspeed means it for everything that the rolling batch is not for, or is not wanted for.
DEEPSPEED_TASK = HandlerRow(
    title="deepspeed task",
    names=(),
    handler="handlers.deepspeed.handler:DeepSpeedTaskHandler",
    options="handlers.deepspeed.options:DeepSpeedOptions",
    engines=("deepspeed",),
    answers_tasks=True,
    reads_checkpoint=True,
    takes_batches=True,
)
_LMI_DIST = HandlerRow(
    title="lmi-dist",
    names=("djl_python.lmi_dist", "lmi_dist"),
    handler="handlers.vllm.lmi_dist_handler:LmiDistHandler",
    options="handlers.vllm.lmi_dist_options:LmiDistOptions",
    rolling_batches=("lmi-dist",),
    engines=("vllm",),
    reads_checkpoint=True,
    batches_by_default=True,
    takes_all_gpus=True,
    needs_mpi=True,
)
VLLM = HandlerRow(
    title="vllm",
    names=("djl_python.lmi_vllm.vllm_async_service", "djl_python.vllm", "vllm"),
    handler="handlers.vllm.handler:VllmHandler",
    options="handlers.vllm.options:VllmOptions",
    rolling_batches=("vllm",),
    engines=("vllm",),
    reads_checkpoint=True,
    batches_by_default=True,
    takes_all_gpus=True,
)
# Named by no entry point of its own: vllm means it for a task of a model that pools.
VLLM_POOLING = HandlerRow(
    title="vllm pooling",
    names=(),
    handler="handlers.vllm.pooling_handler:VllmPoolingHandler",
    options="handlers.vllm.options:VllmPoolingOptions",
    engines=("vllm",),
    reads_checkpoint=True,
    takes_batches=True,
    takes_all_gpus=True,
)
_TENSORRT_LLM = HandlerRow(
    title="tensorrt_llm",
    names=("djl_python.tensorrt_llm", "djl_python.lmi_trtllm.trtllm_async_service", "tensorrt_llm"),
    options="handlers.tensorrt_llm.options:TensorRtLlmOptions",
    rolling_batches=("trtllm",),
    engines=("tensorrt_llm",),
    batches_by_default=True,
    takes_all_gpus=True,
    needs_mpi=True,
)
_NEURONX = HandlerRow(
    title="transformers_neuronx",
    names=("djl_python.transformers_neuronx", "transformers_neuronx", "neuronx"),
    options="handlers.neuronx.options:NeuronxOptions",
    engines=("transformers_neuronx",),
    reads_checkpoint=True,
)
_STABLE_DIFFUSION = HandlerRow(
    title="stable_diffusion",
    names=("djl_python.stable_diffusion", "djl_python.stable-diffusion", "stable_diffusion"),
    options="handlers.stable_diffusion.options:StableDiffusionOptions",
    engines=("diffusers", "deepspeed"),
)
SKLEARN = HandlerRow(
    title="sklearn",
    names=("djl_python.sklearn_handler", "sklearn"),
    handler="handlers.tabular.sklearn_handler:SklearnHandler",
    options="handlers.tabular.options:SklearnOptions",
    engines=("sklearn",),
    takes_batches=True,
)
_XGBOOST = HandlerRow(
    title="xgboost",
    names=("djl_python.xgboost_handler", "xgboost"),
    handler="handlers.tabular.xgboost_handler:XgboostHandler",
    options="handlers.tabular.options:XgboostOptions",
    engines=("xgboost",),
    takes_batches=True,
)
_ECHO = HandlerRow(
    title="echo",
    names=("djl_python.echo", "echo"),
    handler="handlers.echo.handler:EchoHandler",
    options="handlers.echo.options:EchoOptions",
)
JAVA_ENGINE = HandlerRow(title="an engine in Java", names=(), options="handlers.java_engine.options:JavaEngineOptions")
OWN_CODE = HandlerRow(
    title="a handler of one's own",
    names=(),
    handler="handlers.own_code.handler:OwnCodeHandler",
    options="handlers.own_code.options:OwnCodeOptions",
    takes_batches=True,
)

HANDLERS = (
    _HUGGING_FACE,
    PIPELINE,
    DEEPSPEED,
    DEEPSPEED_TASK,
    _LMI_DIST,
    VLLM,
    VLLM_POOLING,
    _TENSORRT_LLM,
    _NEURONX,
    _STABLE_DIFFUSION,
    SKLEARN,
    _XGBOOST,
    _ECHO,
)
DEFAULT_HANDLER = _HUGGING_FACE


def find_handler(entry_point: str) -> HandlerRow | None:
    """Return the row that `entry_point` names."""
    return next((row for row in HANDLERS if entry_point in row.names), None)


def handler_of_rolling_batch(name: str) -> HandlerRow | None:
    """Return the row that option.rolling_batch = `name` means."""
    return next((row for row in HANDLERS if name in row.rolling_batches), None)


def entry_points() -> tuple[str, ...]:
    """Return every name that entryPoint may have."""
    return tuple(name for row in HANDLERS for name in row.names)


def served_entry_points() -> tuple[str, ...]:
    """Return the first name of each handler that this version can serve."""
    return tuple(row.names[0] for row in HANDLERS if row.names and row.handler is not None)


def load_options_type(row: HandlerRow) -> type[ModelOptions]:
    """Import the options class of `row`."""
    return cast("type[ModelOptions]", load(row.options))


def options_type_of(handler: str) -> type[ModelOptions]:
    """Return the options class of the handler class "module:Class".

    A handler that is not in the table is imported and asked for its `options_type`.
    """
    for row in (*HANDLERS, OWN_CODE):
        if row.handler == handler:
            return load_options_type(row)
    return cast("type[ModelOptions]", getattr(load(handler), "options_type", ModelOptions))


def load(path: str) -> object:
    """Import "module:Class" and return the class."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
