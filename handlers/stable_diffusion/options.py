"""The options of the stable_diffusion handler; importable without diffusers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Conflict, Key
from lmi_server.configuration.options import ModelOptions, ParallelDegree, lower, short_dtype


class StableDiffusionOptions(ModelOptions):
    """Keys of serving.properties for a stable-diffusion pipeline that DeepSpeed runs."""

    tensor_parallel_degree: ParallelDegree = Field(1, description="GPUs that one model is split over.")
    rolling_batch: Annotated[Literal["disable", "auto"], BeforeValidator(lower)] = Field(
        "disable", description="Iteration-level batching does not apply to images."
    )
    dtype: Annotated[
        Literal["fp16"],
        Key(also=("option.data_type",)),
        BeforeValidator(short_dtype),
        Allowed("fp16 (float16)"),
    ] = Field("fp16", description="Data type of the weights.")
    enable_cuda_graph: bool = Field(False, description="Capture the forward pass as a CUDA graph.")
    save_mp_checkpoint_path: str | None = Field(
        None, description="Directory to which the model is written, split by device."
    )

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of `deepspeed.init_inference`."""
        return {
            "model": self.model_id,
            "dtype": self.dtype,
            "enable_cuda_graph": self.enable_cuda_graph,
            "tensor_parallel": {"tp_size": self.tensor_parallel_degree},
            "replace_method": "auto",
            "replace_with_kernel_inject": True,
        }

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.enable_cuda_graph and self.tensor_parallel_degree != 1:
            yield Conflict(("option.enable_cuda_graph",), "true only with option.tensor_parallel_degree=1")
