"""The options of the deepspeed handlers; importable without DeepSpeed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from handlers.chats.options import ParserOptions, tool_parser_notes
from handlers.checkpoints.options import TransformersOptions
from handlers.deepspeed.manifest import SHARDS_MANIFEST, manifest_problem
from handlers.rolling_batch.options import RECORDING, RollingBatchMemory, RollingBatchOptions
from handlers.tasks.options import PipelineOptions, generates
from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key, NoEffect, Unavailable
from lmi_server.configuration.engine import EngineDescription, without_keys
from lmi_server.configuration.options import (
    DTYPE_NOTE,
    MPI_MODE_DESCRIPTION,
    Dtype,
    ModelOptions,
    NonNegativeInt,
    ParallelDegree,
    PositiveInt,
    lower,
    one_of,
)
from lmi_server.configuration.references import NAMES_NOTHING, NAMES_PATH
from lmi_server.configuration.tasks import TEXT_GENERATION, Workload, canonical_task
from lmi_server.machine.environment import THREAD_VARIABLES
from lmi_server.machine.inventory import Machine

_OF_KERNELS = ("triangular_masking", "return_tuple", "training_mp_size")
"""The options of DeepSpeed's kernels, which only whole tasks on a GPU have."""
TASKS = (
    "feature-extraction",
    "fill-mask",
    "question-answering",
    "summarization",
    "text-classification",
    "text-embedding",
    TEXT_GENERATION,
    "text2text-generation",
    "token-classification",
    "translation",
    "zero-shot-classification",
)


class DeepSpeedOptions(RollingBatchOptions):
    """Keys of serving.properties for a model that DeepSpeed splits and runs."""

    mpi_mode: bool = Field(False, description=MPI_MODE_DESCRIPTION)
    speculative_draft_model: Annotated[Literal["[ngram]"] | None, Allowed("[ngram]")] = None
    """What drafts tokens for speculative decoding: [ngram] proposes what followed the same words earlier in prompt and
    output, where that pays. No text changes but for rounding: each token is the model's own."""
    tensor_parallel_degree: ParallelDegree = 1
    """Ranks that one model is split over under the MPI engine; at most the number of KV heads."""
    dtype: Annotated[
        Dtype,
        Key(also=("option.data_type",)),
        DTYPE_NOTE,
        Unavailable.values("int8", instead="use option.quantize=dynamic_int8"),
    ] = "auto"
    """Data type of weights and KV cache; auto is that of the checkpoint. The CPU has no fp16."""
    rolling_batch: Annotated[Literal["auto", "deepspeed", "disable"], BeforeValidator(lower)] = "disable"
    """Iteration-level batching of the model that DeepSpeed splits; auto is deepspeed for a causal language model and
    disable for any other."""
    max_rolling_batch_size: PositiveInt = 4
    """Maximum number of requests that one worker decodes together."""
    task: Annotated[
        str | None,
        BeforeValidator(canonical_task),
        one_of((None, *TASKS)),
        Allowed(", ".join(TASKS)),
        Documented(TEXT_GENERATION, "the architecture in config.json determines the task"),
        NAMES_NOTHING,
    ] = None
    """Task of the model by its Hugging Face name; without it the model's files determine the task."""
    enable_streaming: Annotated[Literal["true", "false", "huggingface"], BeforeValidator(lower)] = "false"
    """Without a rolling batch: answer tasks that generate text as JSON lines, one per step. With a rolling batch
    `stream` in the request decides."""
    quantize: Literal["dynamic_int8", "smoothquant"] | None = None
    """Compute linear layers with weights and activations in 8 bits. smoothquant first moves outliers of the
    activations, which it measures on a few sentences, into the weights."""
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")] | None = None
    """Share of the outliers that smoothquant moves into the weights; the default is 0.5."""
    max_tokens: PositiveInt = 1024
    """Maximum number of tokens of prompt and output together, within the model's own context."""
    low_cpu_mem_usage: Annotated[bool, NoEffect("transformers always does so")] = True
    """Load weights one by one instead of taking twice the model's memory."""
    triangular_masking: bool = True
    """Mask attention to later tokens in DeepSpeed's kernels."""
    return_tuple: bool = True
    """Return a tuple instead of a tensor from the layers of DeepSpeed's kernels."""
    training_mp_size: PositiveInt = 1
    """Tensor parallel degree that the model was trained with, for DeepSpeed's kernels."""
    checkpoint: Annotated[str | None, NAMES_PATH] = None
    """Manifest, in the model directory, of weights that `lmi-server partition` has split or quantised, or
    DeepSpeed's list of files with a whole model (type BLOOM or ds_model). For the rolling batch. Without option.dtype
    the data type of the manifest counts."""
    enable_cuda_graph: bool | None = Field(False, description=RECORDING)  # LMI documents this default
    save_mp_checkpoint_path: Annotated[str | None, NAMES_PATH] = None
    """Directory to which each rank writes its weights while the model loads."""
    deepspeed_config_path: Annotated[str | None, NAMES_PATH] = None
    """JSON file with DeepSpeed's configuration, relative to the model directory. It replaces the whole configuration
    that these keys make."""
    device: Annotated[NonNegativeInt, NoEffect("each process uses the GPU of its rank")] = 0
    """GPU of the process."""
    threads: PositiveInt | None = None
    """Threads of an operation on the CPU, per rank. By default all ranks of the model's workers (maxWorkers) divide the
    cores that the server may use."""

    @property
    def streams(self) -> bool:
        return self.enable_streaming != "false"

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the configuration for `deepspeed.init_inference`, without the data type."""
        if self.deepspeed_config_path is not None:
            return {"config": self.deepspeed_config_path}
        return {
            "tensor_parallel": {"tp_size": self.tensor_parallel_degree},
            "enable_cuda_graph": self.enable_cuda_graph,
            "triangular_masking": self.triangular_masking,
            "return_tuple": self.return_tuple,
            "training_mp_size": self.training_mp_size,
            "max_tokens": self.max_tokens,
        }

    def within(self, model_dir: str) -> DeepSpeedOptions:
        """Return a copy of these options whose relative paths are resolved against the model directory."""
        if self.deepspeed_config_path is None:
            return self
        return self.model_copy(update={"deepspeed_config_path": str(Path(model_dir) / self.deepspeed_config_path)})

    def reading(self) -> TransformersOptions:
        """Return the options with which transformers loads the checkpoint, before DeepSpeed splits the model."""
        return TransformersOptions(**self._shared_values())

    def pipeline(self, task: str) -> PipelineOptions:
        """Return the options with which a task loads the checkpoint and runs."""
        max_model_len, streaming = self.max_tokens if generates(task) else None, self.enable_streaming
        return PipelineOptions(
            **self._shared_values(), task=task, enable_streaming=streaming, max_model_len=max_model_len
        )

    def _shared_values(self) -> dict[str, Any]:
        names = ("model_id", "revision", "trust_remote_code", "dtype", "threads")
        return {name: getattr(self, name) for name in names}

    def context_length(self) -> int | None:
        return self.max_tokens

    def unavailable(self) -> Iterator[Conflict]:
        degree = self.tensor_parallel_degree
        if not self.mpi_mode and degree not in (1, -1, "max"):
            yield Conflict(("option.tensor_parallel_degree",), "use engine=MPI, or 1")
        whole_tasks = self.rolling_batch == "disable"
        if whole_tasks and self.streams and self.mpi_mode and degree not in (1, -1):
            yield Conflict(
                ("option.enable_streaming",),
                "several ranks answer a static batch whole; use option.rolling_batch=deepspeed, or one rank",
            )
        for key in ("option.checkpoint", "option.save_mp_checkpoint_path"):
            if whole_tasks and getattr(self, key.removeprefix("option.")) is not None:
                yield Conflict((key,), "use option.rolling_batch=deepspeed")

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.quantize == "smoothquant" and self.dtype == "bf16":
            yield Conflict(("option.quantize", "option.dtype"), "smoothquant only with option.dtype=fp16 or fp32")
        if self.checkpoint is not None and self.quantize is not None:
            yield Conflict(("option.checkpoint",), "a checkpoint only without option.quantize")
        yield from self.reasoning_conflicts()

    def warnings(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.deepspeed_config_path is not None:
            for key in (f"option.{name}" for name in ("enable_cuda_graph", *_OF_KERNELS)):
                if key in given:
                    yield Conflict((key,), "has no effect: the file of option.deepspeed_config_path replaces it")


class DeepSpeedEngine(EngineDescription[DeepSpeedOptions]):
    """DeepSpeed."""

    memory_type = RollingBatchMemory
    keeps_prefixes = True
    variables = THREAD_VARIABLES
    notes = tool_parser_notes

    def without_effect(self, machine: Machine) -> Iterator[tuple[str, Collection[str]]]:
        if self.options.quantize != "smoothquant":
            yield "option.quantize=smoothquant", ("smoothquant_alpha",)
        if self.options.rolling_batch != "disable":
            yield "option.rolling_batch=disable", ("enable_streaming", *_OF_KERNELS)
            return
        chats = sorted(ParserOptions.model_fields.keys() - ModelOptions.model_fields.keys())
        yield "option.rolling_batch=deepspeed", ("enable_cuda_graph", "enable_torch_compile", *chats)
        if not machine.gpus:
            yield "a GPU, which DeepSpeed's kernels need", _OF_KERNELS

    def checkpoint_problem(self, location: Path, config: Mapping[str, Any], on_gpus: bool) -> tuple[str, str] | None:
        if self.options.checkpoint is None or self.options.rolling_batch == "disable":  # the latter has its own error
            return None
        if not location.is_dir():
            return None
        manifest = location / self.options.checkpoint
        problem = manifest_problem(manifest, self.options.ranks or 1)
        return None if problem is None else ("option.checkpoint", problem)

    def partition(self, config: Mapping[str, Any]) -> Mapping[str, str | None] | str:
        degree = max(1, self.options.devices_per_worker or 1)
        if self.options.rolling_batch == "disable":
            return "set option.rolling_batch=deepspeed"
        if self.options.dtype == "auto":
            return "set option.dtype=fp32, fp16 or bf16, the data type of the written weights"
        if self.options.quantize is None and degree == 1:
            return "set option.tensor_parallel_degree above 1, or option.quantize"
        changed = {"option.checkpoint": SHARDS_MANIFEST, "option.tensor_parallel_degree": str(degree)}
        quantization = ("quantize", "smoothquant_alpha")
        return without_keys("model_id", "revision", "save_mp_checkpoint_path", *quantization) | changed


def runs_whole_tasks(workload: Workload) -> bool:
    """Return whether the task handler serves `workload`; DeepSpeed has a rolling batch only if it is asked for."""
    asked = workload.rolling_batch or "disable"
    if asked != "auto":
        return asked == "disable"
    return workload.task not in (None, TEXT_GENERATION) or workload.batches_statically
