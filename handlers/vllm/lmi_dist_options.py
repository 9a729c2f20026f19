"""The options of the lmi-dist handler: vLLM's options, with LMI-Dist's names and defaults."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from handlers.vllm import engine_fields
from handlers.vllm.options import QUANTIZATIONS, InWorkerOptions
from lmi_server.configuration.declaration import (
    Allowed,
    Conflict,
    Deprecated,
    DeprecatedValue,
    Documented,
    Key,
    NoEffect,
)
from lmi_server.configuration.options import DTYPE_NOTE, MPI_MODE_DESCRIPTION, Dtype, JsonObject, PositiveInt, lower
from lmi_server.configuration.references import NAMES_NOTHING
from lmi_server.configuration.tasks import Workload

_VLLM_NAMES = {"bitsandbytes8": "bitsandbytes"}  # LMI-Dist's name -> vLLM's name, if they differ
Quantize = Annotated[
    Literal["bitsandbytes8", "gptq", "awq", "squeezellm"],
    BeforeValidator(lambda method: "bitsandbytes8" if method == "bitsandbytes" else method),
]


def _as_json(value: object) -> object:
    """Return LMI-Dist's form image=2,video=1 as JSON. Any other value stays as it is, for the type to check."""
    if not isinstance(value, str) or value.lstrip().startswith("{"):
        return value
    pairs = [pair.partition("=") for pair in value.split(",")]
    if not all(count.strip().isdecimal() for _, _, count in pairs):
        return value
    return json.dumps({kind.strip(): int(count) for kind, _, count in pairs})


class LmiDistOptions(InWorkerOptions):
    """Keys of serving.properties for a model configured for LMI-Dist: vLLM's engine on the ranks of the MPI engine."""

    mpi_mode: bool = Field(False, description=MPI_MODE_DESCRIPTION)
    rolling_batch: Annotated[Literal["auto", "lmi-dist"], BeforeValidator(lower)] = "auto"
    """vLLM batches by itself with any of these values."""
    dtype: Annotated[Dtype, Key(also=("option.data_type",)), DTYPE_NOTE] = Field(
        "auto",
        description="Data type of weights and KV cache; auto is the checkpoint's own, and int8 what LMI-Dist made of"
        " it: weights in 8 bits, as option.quantize=bitsandbytes8.",
    )
    quantize: Annotated[Quantize | None, DeprecatedValue("bitsandbytes", "use bitsandbytes8")] = None
    """Quantisation of the weights; all methods but bitsandbytes8 need a checkpoint quantised with them."""
    max_rolling_batch_prefill_tokens: Annotated[
        PositiveInt | None,
        Deprecated("the best value is computed from the machine"),
        Documented("1088", "deprecated since 0.25.0, when LMI began to compute it"),
    ] = None
    """Prompt tokens that one step computes at most."""
    enable_prefix_caching: bool = False
    """Reuse the KV cache of prompt prefixes that requests share."""
    limit_mm_per_prompt: Annotated[
        JsonObject | None, BeforeValidator(_as_json), Allowed("image=2,video=1 or a JSON object"), NAMES_NOTHING
    ] = None
    """Images, videos and such per prompt, by kind."""
    draft_model_tp_size: PositiveInt = 1
    """GPUs that the draft model is split over."""
    speculative_telemetry: Annotated[bool, NoEffect("vLLM reports it in /metrics")] = True
    """Log how many drafted tokens were accepted."""
    record_acceptance_rate: Annotated[bool, NoEffect("vLLM reports it in /metrics")] = False
    """Log the rate at which drafted tokens are accepted."""

    @property
    def vllm_quantization(self) -> str | None:
        method = "bitsandbytes8" if self.dtype == "int8" else self.quantize
        return None if method is None else _VLLM_NAMES.get(method, method)

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of vLLM's EngineArgs; arguments under vLLM's own names are text."""
        arguments = {**super().engine_arguments(), "distributed_executor_backend": "external_launcher"}
        if self.vllm_quantization is not None:
            arguments["quantization"] = self.vllm_quantization
        if self.dtype == "int8":
            arguments["dtype"] = "auto"
        return arguments

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        if not self.mpi_mode:
            yield Conflict(("option.mpi_mode", "option.rolling_batch"), "lmi-dist only with engine=MPI")
        if self.enable_lora and self.speculative_draft_model is not None:
            yield Conflict(
                ("option.enable_lora", "option.speculative_draft_model"),
                "true only without option.speculative_draft_model",
            )
        yield from self.drafting_conflicts()
        if self.dtype == "int8" and self.quantize not in (None, "bitsandbytes8"):
            yield Conflict(("option.dtype", "option.quantize"), "int8 only without option.quantize")
        else:
            yield from self.unknown_to_vllm()
        yield from self.parser_conflicts()


def leaves_8_bits(workload: Workload) -> bool:
    """Return whether weights are to be quantised to 8 bits, and the installed vLLM is known not to do it.

    vLLM left bitsandbytes out. Its int8_per_channel_weight_only quantises mixtures of experts and no other layers.
    """
    methods = engine_fields.literal(*QUANTIZATIONS)
    return workload.in_8_bits and bool(methods) and "bitsandbytes" not in methods
