"""The LLMConfig of Ray Serve LLM (`ray.serve.llm`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmi_server.configuration.declaration import Allowed, NoEffect, Unavailable
from lmi_server.configuration.model_file.serve_sections import (
    Amounts,
    Anything,
    DeploymentSection,
    MirrorSection,
    Section,
    Strategy,
)
from lmi_server.configuration.options import PositiveFloat, PositiveInt


class ModelLoading(Section):
    """Where the model comes from."""

    model_id: str = Field(description="Name by which requests ask for the model.")
    model_source: Annotated[
        str | MirrorSection | None,
        Allowed("a Hugging Face id, a directory, s3:// or gs://bucket/prefix, or a bucket_uri"),
    ] = Field(
        None, description="Hugging Face id, directory, s3:// or gs:// address of the weights; model_id if not set."
    )
    tokenizer_source: str | None = Field(None, description="Another place of the tokenizer, for vLLM.")


_BY_CLIENT = NoEffect("the S3 client has limits and retries of its own")


class LoraSection(Section):
    """LoRA adapters."""

    dynamic_lora_loading_path: str | None = Field(
        None, description="Directory, or s3://bucket/prefix, of adapters that are loaded when requests ask for them."
    )
    max_num_adapters_per_replica: PositiveInt = Field(16, description="Adapters that a replica keeps loaded.")
    download_timeout_s: Annotated[PositiveFloat | None, _BY_CLIENT] = Field(
        None, description="Seconds that fetching an adapter may take."
    )
    max_download_tries: Annotated[PositiveInt, _BY_CLIENT] = Field(
        3, description="Times that fetching an adapter is tried."
    )


class PlacementSection(Section):
    """The placement group of a replica: `bundles`, or `bundle_per_worker` once for each worker."""

    bundles: list[Amounts] | None = Field(None, description="Resources of each worker.")
    bundle_per_worker: Amounts | None = Field(None, description="Resources of every worker.")
    strategy: Strategy = Field("PACK", description="How the bundles spread over nodes.")


class LlmConfigFile(Section):
    """An LLMConfig of Ray Serve LLM."""

    model_loading_config: ModelLoading = Field(description="The model's name, and where it comes from.")
    llm_engine: Literal["vLLM"] | None = Field(
        None, description="Engine. If not set, the server chooses what serves the model best."
    )
    engine_kwargs: Anything = Field({}, description="Arguments of the engine by vLLM's names.")
    accelerator_type: str | None = Field(None, description="Type of accelerator that the nodes must have.")
    accelerator_config: Annotated[
        Anything,
        Unavailable(lambda config: config.get("kind") == "tpu", "use GPUs, Neuron cores or kind: cpu", "kind: tpu"),
    ] = Field({}, description="Kind of accelerator; kind: cpu runs without one.")
    placement_group_config: PlacementSection | None = Field(None, description="What the workers of a replica take.")
    lora_config: LoraSection | None = Field(None, description="LoRA adapters.")
    deployment_config: DeploymentSection = Field(
        DeploymentSection.model_construct(), description="Replicas of the model."
    )
    runtime_env: Anything | None = Field(
        None, description="Ray's runtime environment. On one machine env_vars alone has an effect."
    )
    log_engine_metrics: Annotated[bool | None, NoEffect("/metrics always has them")] = Field(
        None, description="Report the engine's metrics."
    )
    server_cls: Annotated[str | None, Unavailable(bool, "remove the key: the server is this one")] = Field(
        None, description="Class of Ray Serve LLM's server."
    )
    experimental_configs: Annotated[Anything, NoEffect("Ray Serve LLM's own router reads it")] = Field(
        {}, description="Settings of Ray Serve LLM's own router."
    )
    callback_config: Annotated[Anything, Unavailable(bool, "remove the key: the server calls no class of Ray's")] = (
        Field({}, description="Callbacks of Ray Serve LLM's server.")
    )
