"""The options of the deepspeed handler; importable without DeepSpeed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Documented, Finding, NoEffect
from lmi_server.configuration.options import ModelOptions, ParallelDegree, PositiveInt, lower, without_effect


class DeepSpeedOptions(ModelOptions):
    """Keys of serving.properties for a model that DeepSpeed runs."""

    tensor_parallel_degree: ParallelDegree = Field(1, description="Devices that one model is split over.")
    rolling_batch: Annotated[Literal["auto", "deepspeed", "disable"], BeforeValidator(lower)] = Field(
        "disable", description="Iteration-level batching over DeepSpeed's kernels; auto is deepspeed."
    )
    max_rolling_batch_size: PositiveInt = Field(4, description="Requests that one worker decodes together.")
    task: Annotated[str | None, Documented("text-generation", "the architecture in config.json tells the task")] = (
        Field(None, description="Task of the model as Hugging Face names it; inferred where not given.")
    )
    quantize: Literal["dynamic_int8", "smoothquant"] | None = Field(None, description="Quantisation of the weights.")
    max_tokens: PositiveInt = Field(1024, description="Tokens of prompt and output together.")
    low_cpu_mem_usage: bool = Field(True, description="Load weights one by one instead of twice the model's memory.")
    enable_cuda_graph: bool = Field(False, description="Capture the forward pass as a CUDA graph.")
    triangular_masking: bool = Field(True, description="Mask attention to later tokens.")
    return_tuple: bool = Field(True, description="Layers return a tuple instead of a tensor.")
    training_mp_size: PositiveInt = Field(1, description="Tensor parallel degree that the model was trained with.")
    checkpoint: str | None = Field(None, description="DeepSpeed's checkpoint file inside the model.")
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")] | None = Field(
        None, description="How much of the outliers smoothquant moves into the weights; DeepSpeed's choice if not set."
    )
    save_mp_checkpoint_path: str | None = Field(None, description="Where to write the model split by device.")
    deepspeed_config_path: str | None = Field(
        None, description="JSON file of DeepSpeed's configuration, which replaces the whole one made from these keys."
    )
    device: Annotated[int, Field(ge=0), Allowed("an integer of 0 or more"), NoEffect("each process has its own")] = (
        Field(0, description="GPU of the process.")
    )

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the configuration that `deepspeed.init_inference` is given."""
        if self.deepspeed_config_path is not None:
            return {"config": self.deepspeed_config_path}
        arguments = {
            "tensor_parallel": {"tp_size": self.tensor_parallel_degree},
            "dtype": self.dtype,
            "enable_cuda_graph": self.enable_cuda_graph,
            "triangular_masking": self.triangular_masking,
            "return_tuple": self.return_tuple,
            "training_mp_size": self.training_mp_size,
            "max_tokens": self.max_tokens,
            "save_mp_checkpoint_path": self.save_mp_checkpoint_path,
            "checkpoint": self.checkpoint,
            **self._quantization(),
        }
        return {name: value for name, value in arguments.items() if value is not None}

    def _quantization(self) -> dict[str, Any]:
        if self.quantize == "dynamic_int8":
            return {"dynamic_quant": {"enabled": True, "use_cutlass": False}}
        if self.quantize == "smoothquant":
            alpha = {} if self.smoothquant_alpha is None else {"alpha": self.smoothquant_alpha}
            return {"smoothing": {"smooth": True, "calibrate": True, **alpha}}
        return {}

    def context_length(self) -> int | None:
        return self.max_tokens

    def contradictions(self, given: Collection[str]) -> Iterator[Finding]:
        if self.quantize == "smoothquant" and self.dtype == "bf16":
            yield Finding(("option.quantize", "option.dtype"), "smoothquant only with option.dtype=fp16 or fp32")
        if self.checkpoint is not None and self.dtype == "auto":
            yield Finding(
                ("option.checkpoint", "option.dtype"), "a checkpoint only with option.dtype=fp32, fp16, bf16 or int8"
            )
        if self.checkpoint is not None and self.quantize is not None:
            yield Finding(("option.checkpoint",), "a checkpoint only without option.quantize")

    def doubts(self, given: Collection[str]) -> Iterator[Finding]:
        if self.quantize != "smoothquant":
            yield from without_effect(given, "option.quantize=smoothquant", ["option.smoothquant_alpha"])
