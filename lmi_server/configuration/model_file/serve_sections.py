"""The common parts of RayLLM's files and Ray Serve LLM's: sections, types, and Ray Serve's own settings.

The keys are those of Ray Serve's config file (`ray.serve.schema`); `formerly` has the names in RayLLM's time.
"""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from lmi_server.artifacts.location import BUCKETS
from lmi_server.configuration.declaration import Allowed, NoEffect, Unavailable
from lmi_server.configuration.options import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)


class Section(BaseModel):
    """A mapping of a model file. A key that is not declared is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), defer_build=True)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field of this type holds; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := section_of(part)) is not None), None)
    return None


def formerly(*names: str) -> JsonDict:
    """Return the mark of a key that had other names: `json_schema_extra` of its field."""
    return {"formerly": list(names)}


Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
Anything = Annotated[dict[str, Any], Allowed("a mapping")]
Amounts = Annotated[dict[str, NonNegativeFloat], Allowed("a mapping of resources to numbers")]
Queue = Annotated[int, Field(ge=-1), Allowed("an integer of -1 (no limit) or more")]
Percentage = Annotated[int, Field(ge=0, le=100), Allowed("an integer from 0 to 100")]
Nodes = Annotated[int, Field(ge=1, le=100), Allowed("an integer from 1 to 100")]


class AutoscalingSection(Section):
    """How many replicas run, and when that changes."""

    min_replicas: NonNegativeInt = Field(1, description="Minimum number of replicas; with 0 an idle model has none.")
    initial_replicas: NonNegativeInt | None = Field(None, description="Replicas at first; min_replicas if not set.")
    max_replicas: PositiveInt = Field(1, description="Maximum number of replicas.")
    target_ongoing_requests: PositiveFloat | None = Field(
        None,
        description="Requests per replica, running and waiting, that scaling aims at; 40 % of max_ongoing_requests if"
        " not set.",
        json_schema_extra=formerly("target_num_ongoing_requests_per_replica"),
    )
    metrics_interval_s: PositiveFloat | None = Field(None, description="Seconds between two reports of a replica.")
    look_back_period_s: PositiveFloat | None = Field(None, description="Seconds over which reports are averaged.")
    smoothing_factor: PositiveFloat | None = Field(
        None, description="Factor on every decision, up and down; upscaling_factor and downscaling_factor go first."
    )
    upscaling_factor: PositiveFloat | None = Field(
        None,
        description="Factor on decisions to scale up; below 1 they are slower.",
        json_schema_extra=formerly("upscale_smoothing_factor"),
    )
    downscaling_factor: PositiveFloat | None = Field(
        None,
        description="Factor on decisions to scale down; below 1 they are slower.",
        json_schema_extra=formerly("downscale_smoothing_factor"),
    )
    upscale_delay_s: NonNegativeFloat | None = Field(None, description="Seconds before replicas are added.")
    downscale_delay_s: NonNegativeFloat | None = Field(None, description="Seconds before replicas are removed.")
    downscale_to_zero_delay_s: NonNegativeFloat | None = Field(
        None, description="Seconds before the last replica is removed; downscale_delay_s if not set."
    )
    aggregation_function: Literal["mean", "max", "min"] | None = Field(
        None, description="How reports over a time become one number."
    )
    policy: Anything | None = Field(None, description="Ray's own autoscaling policy, as Ray takes it.")


class ActorSection(Section):
    """What the actor of a replica takes beside its workers."""

    num_cpus: NonNegativeFloat | None = Field(
        None, description="CPUs of the actor, beside those of its workers; 0 if not set."
    )
    num_gpus: NonNegativeFloat | None = Field(None, description="GPUs of the actor; its workers have their own.")
    memory: NonNegativeFloat | None = Field(None, description="Bytes of main memory.")
    resources: Amounts = Field({}, description="Custom resources, such as accelerator_type:A10G: 0.001.")
    accelerator_type: str | None = Field(None, description="Type of accelerator that the node must have.")
    label_selector: dict[str, str] | None = Field(None, description="Labels that the node must have.")
    fallback_strategy: list[Anything] | None = Field(
        None, description="Other options of the actor if no node suits, as Ray takes them."
    )
    runtime_env: Anything | None = Field(None, description="Ray's runtime environment of the actor.")


class DeploymentSection(Section):
    """Replicas of the model: how many, how many requests each takes, and what each takes of its node."""

    name: str | None = Field(None, description="Name of the deployment; of the model if not set.")
    num_replicas: Annotated[PositiveInt | Literal["auto"] | None, Allowed("an integer of 1 or more, or auto")] = Field(
        None, description="Replicas, if their number is fixed."
    )
    autoscaling_config: AutoscalingSection | None = Field(None, description="Replicas that come and go with the load.")
    max_ongoing_requests: PositiveInt | None = Field(
        None,
        description="Requests that a replica works on at a time; max_num_seqs if not set.",
        json_schema_extra=formerly("max_concurrent_queries"),
    )
    max_queued_requests: Queue | None = Field(None, description="Requests that wait at each proxy; more get 503.")
    ray_actor_options: ActorSection | None = Field(None, description="What the actor of a replica takes.")
    placement_group_bundles: list[Amounts] | None = Field(
        None, description="Resources of each worker of a replica, in place of scaling_config."
    )
    placement_group_strategy: Strategy | None = Field(None, description="How the bundles spread over nodes.")
    placement_group_bundle_label_selector: list[dict[str, str]] | None = Field(
        None, description="Labels that the nodes of the bundles must have."
    )
    graceful_shutdown_wait_loop_s: NonNegativeFloat | None = Field(
        None, description="Seconds between two looks whether a replica that stops is idle."
    )
    graceful_shutdown_timeout_s: NonNegativeFloat | None = Field(
        None, description="Seconds that requests have when their replica ends; --drain-timeout if not set."
    )
    health_check_period_s: PositiveFloat | None = Field(None, description="Seconds between two health checks.")
    health_check_timeout_s: PositiveFloat | None = Field(None, description="Seconds that a health check may take.")
    max_replicas_per_node: Nodes | None = Field(None, description="Most replicas on one node.")
    rolling_update_percentage: Share | None = Field(
        None, description="Share of replicas that an update replaces at once."
    )
    max_surge_percent: Percentage | None = Field(None, description="Replicas beyond the number during an update.")
    user_config: Annotated[Anything | None, NoEffect("a replica has nothing that it could change")] = Field(
        None, description="Ray Serve's user_config."
    )
    logging_config: Anything | None = Field(None, description="Ray Serve's logging_config.")
    request_router_config: Annotated[
        Anything | None, NoEffect("the front ends choose the replica of a request by its session and prefix")
    ] = Field(None, description="Ray Serve's request_router_config.")
    backpressure_config: Annotated[
        Anything | None, NoEffect("requests wait in the front ends, where max_queued_requests is their bound")
    ] = Field(None, description="Ray Serve's backpressure_config.")
    gang_scheduling_config: Anything | None = Field(None, description="Ray Serve's gang_scheduling_config.")
    deployment_actors: list[Anything] | None = Field(None, description="Ray Serve's deployment_actors.")


class ExtraFile(Section):
    """A file that a node needs beside the weights."""

    bucket_uri: str = Field(description="Where the file is.")
    destination_path: str = Field(description="Where it goes.")


class MirrorSection(Section):
    """A copy of the model in a bucket, to fetch it from there."""

    bucket_uri: Annotated[
        str | None,
        Unavailable(
            lambda uri: not str(uri).startswith(BUCKETS),
            "the server fetches from S3, Google Cloud Storage, the Hub and directories",
            "Any other place",
        ),
    ] = Field(None, description="Prefix of the model's files: s3://bucket/prefix or gs://bucket/prefix.")
    extra_files: Annotated[
        list[ExtraFile], Unavailable(bool, "put the files beside the weights"), Allowed("a list of mappings")
    ] = Field([], description="Further files.")
