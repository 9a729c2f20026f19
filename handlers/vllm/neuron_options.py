"""The options of vLLM on AWS Neuron devices (its plugin vllm-neuron), under the entry point of transformers_neuronx."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from handlers.vllm.options import VllmEngineOptions
from lmi_server.configuration.declaration import Allowed, Key
from lmi_server.configuration.options import JsonObject, Lengths, ParallelDegree, PositiveInt, lower
from lmi_server.configuration.references import NUMBERS_ONLY


class NeuronVllmOptions(VllmEngineOptions):
    """Keys of serving.properties for a model that vLLM runs on Neuron cores."""

    rolling_batch: Annotated[Literal["vllm"], BeforeValidator(lower), Allowed("auto, scheduler, disable, vllm")] = (
        "vllm"
    )
    """vLLM batches by itself; any other value leaves the model to transformers_neuronx."""
    tensor_parallel_degree: ParallelDegree = 1
    """Neuron cores that one model is split over."""
    max_model_len: Annotated[PositiveInt | None, Key(also=("option.n_positions",))] = None
    """Maximum number of tokens of prompt and output together; without it the limit in config.json."""
    context_length_estimate: Lengths | None = None
    """Prompt lengths for which graphs are compiled (context_encoding_buckets)."""
    fuse_qkv: bool = False
    """Compute queries, keys and values in one operation (fused_qkv)."""
    sequence_parallel: bool = False
    """Use sequence parallelism (sequence_parallel_enabled)."""
    override_neuron_config: Annotated[JsonObject | None, NUMBERS_ONLY] = None
    """Values of neuronx-distributed-inference's NeuronConfig by its own names."""

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return vLLM's arguments; the plugin reads its own from `additional_config`."""
        named = {
            "context_encoding_buckets": None
            if self.context_length_estimate is None
            else list(self.context_length_estimate),
            "fused_qkv": self.fuse_qkv,
            "sequence_parallel_enabled": self.sequence_parallel,
        }
        overrides = {name: value for name, value in named.items() if value}
        overrides |= json.loads(self.override_neuron_config or "{}")
        plugin = {"additional_config": {"override_neuron_config": overrides}} if overrides else {}
        return {**super().engine_arguments(), **plugin}
