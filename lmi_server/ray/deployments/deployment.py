"""One model on Ray Serve as a plain value: its model, the number of replicas, and their share of a node.

It needs neither a cluster nor the package ray. Names are as in Ray Serve's config file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from lmi_server.configuration.model_file.read import path_name
from lmi_server.configuration.resolve import Inspection

PlacementStrategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
APPLICATION = "lmi-server"
"""The name of the application that all models are deployments of."""
ONGOING_SHARE = 0.4
"""Share of max_ongoing_requests that autoscaling aims at, as RayLLM recommends."""
ACCELERATOR_SHARE = 0.001
"""How much of accelerator_type:A10G and the like a worker asks for: the resource only names a kind of node."""


AUTOSCALING_POLICY = {"policy_function": "lmi_server.ray.autoscaling:desired_replicas"}
"""Scales by the requests that replicas report, because Ray itself sees none of them."""


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Ray Serve's autoscaling_config; what is None has Ray's default."""

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None
    target_ongoing_requests: float | None = None
    metrics_interval_s: float | None = None
    look_back_period_s: float | None = None
    upscaling_factor: float | None = None
    downscaling_factor: float | None = None
    upscale_delay_s: float | None = None
    downscale_delay_s: float | None = None
    downscale_to_zero_delay_s: float | None = None
    aggregation_function: str | None = None
    policy: Mapping[str, Any] = field(default_factory=lambda: AUTOSCALING_POLICY)

    def options(self) -> dict[str, Any]:
        """Return the values that are set, as Ray Serve takes them."""
        return _without_none({name: getattr(self, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """What the actor of a replica takes. Workers beyond the first have bundles in the placement group."""

    num_cpus: float = 1
    num_gpus: float = 0
    memory: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | None = None
    fallback_strategy: tuple[Mapping[str, Any], ...] | None = None

    def options(self) -> dict[str, Any]:
        """Return the values that are set, as Ray takes them."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        resources, fallback = dict(self.resources) or None, self.fallback_strategy
        return _without_none({**values, "resources": resources, "fallback_strategy": fallback and list(fallback)})


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement group of a replica. Its actor is in the first bundle, beside the first worker."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: PlacementStrategy = "STRICT_PACK"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model as a deployment of Ray Serve.

    - `name`: of the deployment; `model_id`: the name by which requests ask for the model, and `aliases` are others.
    - `url`: the model directory, or what `lmi-server serve` takes as a model. Each replica fetches it.
    - `settings`: the layer of the registration call, by key in full, for `inspect_model` and the registry.
    - `num_workers`: ranks of a replica: tensor_parallel_degree x pipeline_parallel_degree.
    - `placement`: None if a replica is nothing but its actor.
    - `more_options`: options of Ray Serve that have no field here, such as health_check_period_s.
    """

    name: str
    model_id: str
    url: str
    aliases: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    autoscaling: Autoscaling | None = None
    num_replicas: int = 1
    max_ongoing_requests: int = 32
    max_queued_requests: int = -1
    num_workers: int = 1
    actor: ActorOptions = field(default_factory=ActorOptions)
    placement: Placement | None = None
    accelerator_type: str | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    more_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path_name(self) -> str:
        """Return the model_id as a path takes it; the model_id stays a name of the model."""
        return path_name(self.model_id)

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name by which requests may ask for the model."""
        return tuple(dict.fromkeys((self.model_id, *self.aliases, self.path_name)))

    def options(self) -> dict[str, Any]:
        """Return the options of Ray Serve: for `Deployment.options`, and for `deployments` in its config file."""
        actor = self.actor.options() | ({"runtime_env": dict(self.runtime_env)} if self.runtime_env else {})
        scaled = self.autoscaling is not None
        return {
            "name": self.name,
            **({} if scaled else {"num_replicas": self.num_replicas}),
            **({"autoscaling_config": self.autoscaling.options()} if self.autoscaling is not None else {}),
            "max_ongoing_requests": self.max_ongoing_requests,
            "max_queued_requests": self.max_queued_requests,
            "ray_actor_options": actor,
            **_placement_options(self.placement),
            **self.more_options,
        }


def deployment_from(found: Inspection, url: str) -> Deployment:
    """Return the deployment of a model whose configuration has been read.

    The workers of a model (minWorkers to maxWorkers) become replicas.
    """
    ongoing = found.options.max_rolling_batch_size
    workers = found.options.devices_per_worker or max(1, len(found.machine.gpus))
    return with_workers(
        Deployment(
            name=found.name,
            model_id=found.name,
            url=url,
            aliases=tuple(found.options.served_model_name),
            autoscaling=_autoscaling(found, ongoing),
            num_replicas=found.serving.min_workers,
            max_ongoing_requests=ongoing,
            max_queued_requests=found.serving.job_queue_size,
            actor=ActorOptions(num_cpus=0),  # it waits for its workers, and computes nothing
        ),
        workers,
        _worker_bundle(found),
    )


def plain(model: Deployment) -> dict[str, Any]:
    """Return the deployment as values of JSON, without what is not set."""
    values: dict[str, Any] = msgspec.to_builtins(model)
    unset: tuple[object, ...] = (None, {})
    return {
        name: {key: part for key, part in value.items() if part not in unset} if isinstance(value, dict) else value
        for name, value in values.items()
        if value not in unset
    }


def with_workers(
    deployment: Deployment, workers: int, bundle: Mapping[str, float], strategy: PlacementStrategy = "STRICT_PACK"
) -> Deployment:
    """Return the deployment with `workers` that take a `bundle` each; the actor of a replica is in the first one."""
    own = deployment.actor
    extra = {"CPU": own.num_cpus, "GPU": own.num_gpus, "memory": own.memory or 0, **own.resources}
    first = _sum(bundle, extra | accelerator_resource(own.accelerator_type))
    bundles = ({name: amount for name, amount in first.items() if amount}, *(dict(bundle) for _ in range(workers - 1)))
    found = in_bundles(deployment, bundles, strategy)
    return found if workers > 1 else replace(found, placement=None)


def in_bundles(
    deployment: Deployment, bundles: Sequence[Mapping[str, float]], strategy: PlacementStrategy
) -> Deployment:
    """Return the deployment with a worker in each of `bundles`.

    The actor of a replica takes all of the first one, since the process beside it uses its GPUs
    (`lmi_server.ray.actors.ranks`).
    """
    first = bundles[0]
    actor = replace(
        deployment.actor,
        num_cpus=first.get("CPU", 0),
        num_gpus=first.get("GPU", 0),
        memory=first.get("memory"),
        resources={name: amount for name, amount in first.items() if name not in ("CPU", "GPU", "memory")},
        accelerator_type=None,
    )
    return replace(deployment, num_workers=len(bundles), actor=actor, placement=Placement(tuple(bundles), strategy))


def accelerator_resource(accelerator_type: str | None) -> dict[str, float]:
    """Return the custom resource by which Ray finds nodes with an accelerator of this type; empty for None."""
    return {} if accelerator_type is None else {f"accelerator_type:{accelerator_type}": ACCELERATOR_SHARE}


def _worker_bundle(found: Inspection) -> dict[str, float]:
    """Return what one worker takes: a GPU if the handler needs one, or the machine has one."""
    needs_gpu = found.engine.device == "gpu" or bool(found.machine.gpus)
    gpus: dict[str, float] = {"GPU": 1} if needs_gpu else {}
    return {"CPU": 1, **gpus}


def _autoscaling(found: Inspection, ongoing: int) -> Autoscaling | None:
    min_workers = found.serving.min_workers
    max_workers = max(min_workers, found.serving.max_workers)
    if min_workers == max_workers:
        return None
    return Autoscaling(min_workers, max_workers, target_ongoing_requests=max(1.0, round(ongoing * ONGOING_SHARE)))


def _placement_options(placement: Placement | None) -> dict[str, Any]:
    if placement is None:
        return {}
    bundles = [dict(bundle) for bundle in placement.bundles]
    return {"placement_group_bundles": bundles, "placement_group_strategy": placement.strategy}


def _sum(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
