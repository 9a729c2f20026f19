"""The options of the huggingface handler; importable without torch, so that the server can check them at start."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from handlers.chats.options import tool_parser_notes
from handlers.checkpoints.options import BLOCK_FORMATS, TransformersEngine, TransformersOptions
from handlers.huggingface.unbatched import UNBATCHED
from handlers.rolling_batch.images.options import ImageOptions
from handlers.rolling_batch.options import RollingBatchMemory, RollingBatchOptions
from lmi_server.configuration.declaration import Conflict, Deprecated, NoEffect, Unavailable
from lmi_server.configuration.options import (
    MPI_MODE_DESCRIPTION,
    STOP_SEQUENCE_DESCRIPTION,
    Fraction,
    ParallelDegree,
    PositiveInt,
    RollingBatch,
    Texts,
)
from lmi_server.configuration.references import NAMES_NOTHING
from lmi_server.configuration.tasks import TEXT_GENERATION, Workload

_NO_PADDING = "sequences are batched without padding"


class HuggingFaceOptions(TransformersOptions, RollingBatchOptions, ImageOptions):
    """Keys of serving.properties for a causal language model under the rolling batch of transformers."""

    mpi_mode: bool = Field(False, description=MPI_MODE_DESCRIPTION)
    tensor_parallel_degree: ParallelDegree = -1
    """GPUs of one worker, over which option.device_map spreads the layers; under the MPI engine the ranks over which
    every layer is split. max means the machine's GPUs, -1 one."""
    rolling_batch: Annotated[
        RollingBatch,
        Unavailable(lambda name: name not in ("auto", "scheduler", "lmi-dist"), "use scheduler or auto"),
    ] = "auto"
    """Implementation of iteration-level batching; auto chooses one for the model, and lmi-dist is served here if its
    weights become 8 bits, which the installed vLLM does not make of them."""
    decoding_strategy: Annotated[
        Literal["greedy", "sample", "contrastive"],
        BeforeValidator(lambda value: "sample" if value == "sampling" else value),
        Unavailable.values(
            "contrastive",
            instead="use greedy or sample: it runs the model on every candidate for a token, which a rolling batch has"
            " no place for",
        ),
    ] = "greedy"
    """Decoding of LMI's requests with neither do_sample nor a temperature."""
    max_sparsity: Annotated[Fraction, NoEffect(_NO_PADDING)] = 0.33
    """Share of padding above which a batch is split."""
    max_splits: Annotated[PositiveInt, NoEffect(_NO_PADDING)] = 3
    """Parts that a batch may be split into."""
    multi_gpu: Annotated[
        Literal["lmi_dist_sharding"] | None,
        Deprecated("use option.tensor_parallel_degree"),
        Unavailable(lambda name: name is not None, "remove the key"),
    ] = None
    """Sharding of a rolling batch over GPUs."""
    stop_sequence: Annotated[Texts, NAMES_NOTHING] = Field((), description=STOP_SEQUENCE_DESCRIPTION)
    max_model_len: PositiveInt | None = None
    """Maximum tokens of prompt and output together; if not set, what config.json allows."""

    def context_length(self) -> int | None:
        return self.max_model_len

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        yield from super().conflicts(given)
        if self.packed_kv_dtype is not None and self.dtype == "fp16":
            keys = ("option.kv_cache_dtype", "option.dtype")
            yield Conflict(
                keys, "int8 and fp8 only with option.dtype=bf16 or fp32; set one of these, or remove the key"
            )
        yield from self.reasoning_conflicts()
        yield from self.image_conflicts()

    @property
    def samples(self) -> bool:
        return self.decoding_strategy == "sample"

    @property
    def default_stops(self) -> tuple[str, ...]:
        return self.stop_sequence

    def unavailable(self) -> Iterator[Conflict]:
        if self.mpi_mode and self.device_map is not None and self.devices_per_worker != 1:
            yield Conflict(("option.device_map",), "each rank of engine=MPI has a device; use engine=Python")
        if self.mpi_mode and self.save_mp_checkpoint_path is not None:
            yield Conflict(("option.save_mp_checkpoint_path",), "each rank reads its part of the weights as they are")
        if self.quantize not in (None, *BLOCK_FORMATS) and (self.ranks or 1) > 1:
            yield Conflict(
                ("option.quantize",),
                f"weights of {self.quantize} are not split over ranks; set option.quantize={BLOCK_FORMATS[0]} on CPUs,"
                " option.tensor_parallel_degree=1, or remove the key",
            )
        if self.enable_lora and (self.ranks or 1) > 1:
            yield Conflict(
                ("option.enable_lora",),
                "a model that is split over ranks takes no LoRA adapters; set option.tensor_parallel_degree=1, or merge"
                " the adapter into the model",
            )


class HuggingFaceMemory(RollingBatchMemory):
    """What the rolling batch keeps of keys, values and encoded images."""

    options: HuggingFaceOptions

    def image_bytes(self, config: Mapping[str, Any]) -> int | None:
        reads_images = isinstance(config.get("vision_config"), dict)
        return int(self.options.image_cache_gb * 2**30) if reads_images and (self.options.ranks or 1) == 1 else None


class HuggingFaceEngine(TransformersEngine):
    """transformers under the rolling batch."""

    options: HuggingFaceOptions
    memory_type = HuggingFaceMemory
    keeps_prefixes = True
    notes = tool_parser_notes


def runs_as_pipeline(workload: Workload) -> bool:
    """Return whether the pipeline handler serves `workload`: a task without decoding, or static batches."""
    asked = workload.rolling_batch or "auto"
    if asked not in ("auto", "disable") or workload.under_mpi:
        return False
    if not UNBATCHED.keys().isdisjoint(workload.architectures):
        return True
    return workload.task not in (None, TEXT_GENERATION) or asked == "disable" or workload.batches_statically
