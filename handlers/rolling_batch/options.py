"""The options of every handler that runs under this project's own rolling batch; the names are SGLang's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from handlers.chats.options import ParserOptions
from handlers.cpu_kernels.row_layout import SCALE_BYTES
from handlers.structured_output.options import WhiteSpaceLimit
from lmi_server.configuration.declaration import Allowed
from lmi_server.configuration.engine import EngineMemory
from lmi_server.configuration.options import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, lower
from lmi_server.configuration.references import NAMES_DRAFT

SchedulePolicy = Annotated[Literal["lpm", "fcfs"], BeforeValidator(lower)]
ChunkSize = Annotated[
    Annotated[int, Field(ge=1)] | Literal[-1],
    BeforeValidator(lambda value: int(value) if value == "-1" else value),
    Allowed("an integer of 1 or more, or -1"),
]

RECORDING = (
    "Record decoding as CUDA graphs when the model loads, and with adapters when they are first in use: on one GPU."
    " Everything else, and a model that cannot be recorded, runs eagerly, and the log says why."
)
"""What option.enable_cuda_graph does; its default differs between handlers."""


class RollingBatchOptions(ParserOptions):
    """Keys of serving.properties for a model under the rolling batch."""

    max_json_whitespace: WhiteSpaceLimit = None
    schedule_policy: SchedulePolicy = "lpm"
    """Which waiting request comes first: the one with the longest prefix in the KV cache (lpm), or the one that came
    first (fcfs)."""
    schedule_window: NonNegativeInt = 64
    """Waiting requests of the job queue that the scheduler sees, for each worker, so that lpm can choose among them.
    While requests of several API keys or priorities wait, it sees none of them: the order is that of the queue then."""
    schedule_conservativeness: PositiveFloat = 1.0
    """Factor on the output that the scheduler expects of a request when it admits it; lower it if token usage stays
    below 0.9 while requests wait, raise it if the log often reports retracted requests."""
    chunked_prefill_size: ChunkSize | None = None
    """Prompt tokens computed per step, also while others decode; -1 computes every prompt in one step. If not set, on
    the CPU 128 while others decode (up to 512 if more short prompts wait) and 512 while none does, and on a GPU up to
    2048 and 8192, as memory allows. Larger ones are a few percent faster in all, and stop the streams of others for
    longer."""
    max_running_requests: PositiveInt | None = None
    """Requests that are decoded together; if not set, option.max_rolling_batch_size."""
    mem_fraction_static: Fraction | None = None
    """Share of the memory of the device for weights and KV cache; if not set, the handler chooses."""
    kv_cache_memory_gb: PositiveFloat | None = None
    """Maximum memory of the KV cache in GiB; it overrides option.mem_fraction_static."""
    kv_cache_dtype: Annotated[Literal["auto", "int8", "fp8"], BeforeValidator(lower)] = "auto"
    """Type of keys and values in the KV cache: auto is that of the model; int8 and fp8 (E4M3) take half the memory of
    bf16, with a scale for each token and head. They are for models in bf16 or fp32 on the CPU."""
    speculative_draft_model: Annotated[str | None, NAMES_DRAFT] = None
    """What drafts tokens for speculative decoding, where that pays: [ngram] proposes what followed the same words
    earlier in prompt and output; else a smaller model with the same tokenizer, as a directory or an id, on the CPU
    only. No text changes but for rounding: each token is the model's own."""
    speculative_length: PositiveInt = 5
    """Tokens that are drafted at most per sequence and step."""
    enable_cuda_graph: bool | None = Field(
        None,
        description=f"{RECORDING} If not set, it is recorded where one GPU by NVIDIA has the whole model.",
    )
    enable_torch_compile: bool = False
    """Compile decoding with torch.compile when the model loads: on one GPU, and on the CPU in fp16, for requests
    without adapters. Everything else, and a model that cannot be compiled, runs eagerly, and the log says why."""

    @property
    def packed_kv_dtype(self) -> str | None:
        """Return option.kv_cache_dtype; None if keys and values have the type of the model."""
        return None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


class RollingBatchMemory(EngineMemory[RollingBatchOptions]):
    """What the rolling batch keeps of keys and values."""

    def kv_row_bytes(self, elements: int, width: int) -> int:
        packed = self.options.packed_kv_dtype is not None
        return elements + SCALE_BYTES if packed else super().kv_row_bytes(elements, width)
