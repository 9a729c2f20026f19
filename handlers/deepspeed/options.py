"""The options of the deepspeed handlers; importable without DeepSpeed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from handlers.checkpoints.options import TransformersOptions
from handlers.rolling_batch.options import RollingBatchOptions
from handlers.tasks.options import PipelineOptions, generates
from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key, NoEffect, Unavailable
from lmi_server.configuration.options import (
    DTYPE_NOTE,
    MPI_MODE_DESCRIPTION,
    Dtype,
    ParallelDegree,
    PositiveInt,
    lower,
    without_effect,
)
from lmi_server.configuration.tasks import TEXT_GENERATION, Workload, canonical_task
from lmi_server.machine.threads import THREAD_VARIABLES

SHARDS_MANIFEST = "ds_inference_config.json"
"""The file that says which weights belong to which rank, beside the weights."""

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


def _known_task(task: str) -> str:
    if task not in TASKS:
        raise ValueError("not a task of this handler")
    return task


class DeepSpeedOptions(RollingBatchOptions):
    """Keys of serving.properties for a model that DeepSpeed splits and runs."""

    mpi_mode: bool = Field(False, description=MPI_MODE_DESCRIPTION)
    tensor_parallel_degree: ParallelDegree = Field(
        1, description="Ranks that one model is split over, under the MPI engine; at most the model's KV heads."
    )
    dtype: Annotated[
        Dtype,
        Key(also=("option.data_type",)),
        DTYPE_NOTE,
        Unavailable.values("int8", instead="use option.quantize=dynamic_int8"),
    ] = Field(
        "auto", description="Data type of weights and KV cache; auto is the checkpoint's own. No fp16 on the CPU."
    )
    rolling_batch: Annotated[Literal["auto", "deepspeed", "disable"], BeforeValidator(lower)] = Field(
        "disable",
        description="Iteration-level batching over the model that DeepSpeed has split; auto is deepspeed for causal"
        " language models, and otherwise disable.",
    )
    max_rolling_batch_size: PositiveInt = Field(4, description="Requests that one worker decodes together.")
    task: Annotated[
        str | None,
        BeforeValidator(canonical_task),
        AfterValidator(lambda task: task if task is None else _known_task(task)),
        Allowed(", ".join(TASKS)),
        Documented(TEXT_GENERATION, "the architecture in config.json tells the task"),
    ] = Field(None, description="Task of the model as Hugging Face names it; inferred where not given.")
    enable_streaming: Annotated[Literal["true", "false", "huggingface"], BeforeValidator(lower)] = Field(
        "false",
        description="Without a rolling batch, answer tasks that generate text as JSON lines, one per step; with one the"
        " request's `stream` decides.",
    )
    quantize: Literal["dynamic_int8", "smoothquant"] | None = Field(
        None,
        description="Weights and activations of linear layers in 8 bits, on the CPU only; smoothquant first moves"
        " outliers of the activations into the weights, as a few sentences show them.",
    )
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")] | None = Field(
        None, description="How much of the outliers smoothquant moves into the weights; 0.5 if not set."
    )
    max_tokens: PositiveInt = Field(
        1024, description="Tokens of prompt and output together, as far as the model's own context goes."
    )
    low_cpu_mem_usage: Annotated[bool, NoEffect("transformers always loads this way")] = Field(
        True, description="Load weights one by one instead of twice the model's memory."
    )
    enable_cuda_graph: bool = Field(
        False, description="Capture the forward pass of DeepSpeed's kernels as a CUDA graph, on one GPU."
    )
    triangular_masking: bool = Field(True, description="DeepSpeed's kernels mask attention to later tokens.")
    return_tuple: bool = Field(True, description="Layers of DeepSpeed's kernels return a tuple instead of a tensor.")
    training_mp_size: PositiveInt = Field(
        1, description="Tensor parallel degree that the model was trained with, for DeepSpeed's kernels."
    )
    checkpoint: str | None = Field(
        None,
        description="Manifest inside the model of weights that were split or quantised ahead of time, by `lmi-server"
        " partition`; for the rolling batch.",
    )
    save_mp_checkpoint_path: str | None = Field(
        None, description="Directory to write the weights to as each rank holds them, while the model loads."
    )
    deepspeed_config_path: str | None = Field(
        None,
        description="JSON file of DeepSpeed's configuration, which replaces the whole one made from these keys;"
        " relative to the model directory.",
    )
    device: Annotated[int, Field(ge=0), Allowed("an integer of 0 or more"), NoEffect("each process has its own")] = (
        Field(0, description="GPU of the process.")
    )
    threads: PositiveInt | None = Field(None, description="Threads of one rank inside an operation on the CPU.")

    @property
    def streams(self) -> bool:
        return self.enable_streaming != "false"

    def worker_environment(self) -> Mapping[str, str]:
        return THREAD_VARIABLES

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the configuration that `deepspeed.init_inference` is given, beside the data type."""
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
        """Return these options with paths that are relative to the model directory in full."""
        if self.deepspeed_config_path is None:
            return self
        return self.model_copy(update={"deepspeed_config_path": str(Path(model_dir) / self.deepspeed_config_path)})

    def reading(self) -> TransformersOptions:
        """Return how transformers reads the checkpoint before DeepSpeed is given the model."""
        return TransformersOptions(**self._shared())

    def pipeline(self, task: str) -> PipelineOptions:
        """Return how a task reads the checkpoint and runs."""
        longest, streaming = self.max_tokens if generates(task) else None, self.enable_streaming
        return PipelineOptions(**self._shared(), task=task, enable_streaming=streaming, max_model_len=longest)

    def _shared(self) -> dict[str, Any]:
        names = ("model_id", "revision", "trust_remote_code", "dtype", "threads")
        return {name: getattr(self, name) for name in names}

    def context_length(self) -> int | None:
        return self.max_tokens

    def partitioned(self) -> Mapping[str, str | None] | str:
        degree = max(1, self.devices_per_worker or 1)
        if self.rolling_batch == "disable":
            return "set option.rolling_batch=deepspeed"
        if self.dtype == "auto":
            return "set option.dtype=fp32, fp16 or bf16, which the weights are written in"
        if self.quantize is None and degree == 1:
            return "set option.tensor_parallel_degree above 1, or option.quantize"
        removed = ("model_id", "revision", "quantize", "smoothquant_alpha", "save_mp_checkpoint_path")
        kept = {"option.checkpoint": SHARDS_MANIFEST, "option.tensor_parallel_degree": str(degree)}
        return {**{f"option.{name}": None for name in removed}, **kept}

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
        if self.checkpoint is not None and self.dtype == "auto":
            yield Conflict(
                ("option.checkpoint", "option.dtype"), "a checkpoint only with option.dtype=fp32, fp16, bf16 or int8"
            )
        if self.checkpoint is not None and self.quantize is not None:
            yield Conflict(("option.checkpoint",), "a checkpoint only without option.quantize")

    def warnings(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.quantize != "smoothquant":
            yield from without_effect(given, "option.quantize=smoothquant", ["option.smoothquant_alpha"])
        if self.rolling_batch != "disable":
            yield from without_effect(given, "option.rolling_batch=disable", ["option.enable_streaming"])


def runs_whole_tasks(workload: Workload) -> bool:
    """Return whether the task handler serves `workload`; DeepSpeed has a rolling batch only if it is asked for."""
    asked = workload.rolling_batch or "disable"
    if asked != "auto":
        return asked == "disable"
    return workload.task not in (None, TEXT_GENERATION) or workload.batches_statically
