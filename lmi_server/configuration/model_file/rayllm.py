"""The model files of RayLLM: deployment_config, engine_config, scaling_config."""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lmi_server.configuration.declaration import Allowed, NoEffect, Unavailable
from lmi_server.configuration.model_file.serve_sections import (
    Amounts,
    Anything,
    DeploymentSection,
    MirrorSection,
    Section,
    Strategy,
)
from lmi_server.configuration.options import NonNegativeFloat, PositiveFloat, PositiveInt

_SHOWN = NoEffect("the server's list of models has no such field")


def _pattern(*names: str) -> Callable[[str], str]:
    """Return the check of a text that is formatted with `names`; the first must be in it."""

    def check(text: str) -> str:
        found = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        if names[0] not in found or not found <= set(names):
            raise ValueError("other names")
        return text

    return check


Pattern = Annotated[
    str, AfterValidator(_pattern("instruction")), Allowed("a text with {instruction}, and {{ and }} for braces")
]
UserPattern = Annotated[
    str,
    AfterValidator(_pattern("instruction", "system")),
    Allowed("a text with {instruction}, perhaps {system}, and {{ and }} for braces"),
]
AtMostOne = Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1; use num_workers for more GPUs")]
StopTexts = Annotated[list[str], Allowed("a list of texts")]


class PromptFormat(Section):
    """How a chat becomes a prompt; {instruction} stands for the content of a message."""

    system: Pattern = Field(description="A system message.")
    assistant: Pattern = Field(description="An answer in the past of the chat.")
    trailing_assistant: str = Field(description="The text after which the model's answer begins.")
    user: UserPattern = Field(
        description="A user's message; with system_in_user, {system} stands for the system message."
    )
    default_system_message: str = Field("", description="The system message of chats without one.")
    system_in_user: bool = Field(False, description="Put the system message into the first user's message.")
    add_system_tags_even_if_message_is_empty: bool = Field(
        False, description="Write `system` for an empty system message too."
    )
    strip_whitespace: bool = Field(True, description="Strip the contents of messages.")


class Generation(Section):
    """Defaults of requests."""

    prompt_format: PromptFormat | None = Field(
        None, description="How a chat becomes a prompt; the model's own chat template if not set."
    )
    stopping_sequences: StopTexts = Field([], description="Texts that end every output, beside those of the request.")
    generate_kwargs: Annotated[Anything, NoEffect("requests name their parameters themselves")] = Field(
        {}, description="Parameters of generation."
    )


class S3Mirror(MirrorSection):
    """A copy of the model in S3."""

    s3_sync_args: Annotated[list[str], NoEffect("the server's own S3 client fetches"), Allowed("a list of texts")] = (
        Field([], description="Arguments of `aws s3 sync`.")
    )
    s3_aws_credentials: Annotated[
        Anything, Unavailable(bool, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the node a role")
    ] = Field({}, description="Where credentials come from.")


class EngineSection(Section):
    """The model, and how its engine runs it."""

    model_id: str = Field(description="Name by which requests ask for the model.")
    hf_model_id: str | None = Field(
        None, description="Hugging Face id, directory or s3:// address of the weights; model_id if not set."
    )
    model_local_path: str | None = Field(None, description="Directory of the weights; it goes before hf_model_id.")
    tokenizer_id: str | None = Field(None, description="Another place of the tokenizer, for vLLM.")
    type: Literal["VLLMEngine", "TRTLLMEngine", "EmbeddingEngine"] | None = Field(
        None, description="Engine. If not set, the server chooses what serves the model best."
    )
    model_type: Annotated[Literal["text-generation", "text-generation-finetuned", "embedding"] | None, _SHOWN] = Field(
        None, description="Kind of model in RayLLM's list of models."
    )
    model_url: Annotated[str | None, _SHOWN] = Field(None, description="Page of the model in RayLLM's list.")
    model_description: Annotated[str | None, _SHOWN] = Field(None, description="Text on the model in RayLLM's list.")
    engine_kwargs: Anything = Field(
        {}, description="Arguments of the engine by vLLM's names: max_num_seqs, quantization, max_model_len, ..."
    )
    max_total_tokens: PositiveInt | None = Field(None, description="Tokens of prompt and output together.")
    generation: Generation = Field(Generation.model_construct(), description="Defaults of requests.")
    runtime_env: Anything = Field(
        {}, description="Ray's runtime environment. On one machine env_vars alone has an effect."
    )
    s3_mirror_config: S3Mirror | None = Field(None, description="A copy of the model in S3.")
    gcs_mirror_config: MirrorSection | None = Field(
        None, description="A copy of the model in Google Cloud Storage; s3_mirror_config goes before it."
    )


class ScalingSection(Section):
    """The workers of one replica."""

    num_workers: PositiveInt = Field(1, description="Workers of a replica: the degree of tensor parallelism.")
    num_gpus_per_worker: AtMostOne = Field(1, description="GPUs of a worker; a share of one, or 0, is allowed.")
    num_cpus_per_worker: NonNegativeFloat = Field(1, description="CPUs of a worker.")
    placement_strategy: Strategy = Field("STRICT_PACK", description="How the workers spread over nodes.")
    resources_per_worker: Amounts = Field(
        {}, description="Custom resources of a worker, such as accelerator_type:A10G: 0.001."
    )
    pg_timeout_s: Annotated[PositiveFloat | None, NoEffect("Ray Serve waits for placement groups itself")] = Field(
        None, description="Seconds that placing the workers may take."
    )


class MultiplexSection(Section):
    """LoRA adapters that are loaded on demand."""

    max_num_models_per_replica: PositiveInt = Field(description="Adapters that a replica keeps in main memory.")


class RayLlmFile(Section):
    """A model file of RayLLM."""

    deployment_config: DeploymentSection = Field(
        DeploymentSection.model_construct(), description="Replicas of the model."
    )
    engine_config: EngineSection = Field(description="The model, and how its engine runs it.")
    scaling_config: ScalingSection = Field(ScalingSection.model_construct(), description="The workers of one replica.")
    multiplex_config: MultiplexSection | None = Field(None, description="LoRA adapters that are loaded on demand.")
    enabled: bool = Field(True, description="Whether a folder of files deploys the model; one by name it always does.")
