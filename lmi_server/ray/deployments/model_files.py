"""Deployments of what a user names: model directories, model files of Ray, and folders of them. Needs no Ray."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_server.artifacts.fetch import artifact_settings, fetch_model_directory
from lmi_server.artifacts.location import RAY_MODEL_FILE, how_to_write, names_model_file
from lmi_server.configuration.model_file.application import models_of
from lmi_server.configuration.model_file.llm_config import LlmConfigFile
from lmi_server.configuration.model_file.rayllm import RayLlmFile
from lmi_server.configuration.model_file.read import ModelFile, read_model_file
from lmi_server.configuration.model_file.serve_sections import ActorSection, AutoscalingSection, DeploymentSection
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.contract.errors import ArtifactError, ConfigurationError
from lmi_server.machine.inventory import Machine
from lmi_server.ray.deployments.deployment import (
    AUTOSCALING_POLICY,
    ONGOING_SHARE,
    ActorOptions,
    Autoscaling,
    Deployment,
    accelerator_resource,
    deployment_from,
    in_bundles,
    with_workers,
)
from lmi_server.serving.models.model_store import discover, is_one_model

_AUTO_REPLICAS = 100  # most replicas of num_replicas: auto, as in Ray Serve
_ACCELERATOR = "accelerator_type:"
# Options of Ray Serve that are passed on as they are.
_MORE = (
    "placement_group_bundle_label_selector",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "max_replicas_per_node",
    "rolling_update_percentage",
    "max_surge_percent",
    "logging_config",
    "gang_scheduling_config",
    "deployment_actors",
)


@dataclass(frozen=True, slots=True)
class InspectedDeployment:
    """A deployment, and the configuration of its model as this machine reads it."""

    deployment: Deployment
    found: Inspection
    warnings: tuple[str, ...]


def deployments(
    models: Sequence[str], environment: Mapping[str, str], machine: Machine | None = None
) -> tuple[Deployment, ...]:
    """Return a deployment for each of `models`: directories, model files, and folders of both.

    Raises ConfigurationError if one of them is wrong, or if two have one name.
    """
    return tuple(model.deployment for model in inspect_deployments(models, environment, machine))


def inspect_deployments(
    models: Sequence[str], environment: Mapping[str, str], machine: Machine | None = None
) -> tuple[InspectedDeployment, ...]:
    """Return the same deployments, each with what is known of its model."""
    found = [model for argument in models for model in _of_argument(argument, environment, machine)]
    for model in found:
        _refuse_executor_of_ray(model)
    for names in ([[model.deployment.name] for model in found], [model.deployment.names for model in found]):
        counted = Counter(name for of_one in names for name in of_one)
        twice = next((name for name, count in counted.items() if count > 1), None)
        if twice is not None:
            raise ConfigurationError(f"two models are named {twice}; rename one")
    return tuple(found)


def _refuse_executor_of_ray(model: InspectedDeployment) -> None:
    """Raise ConfigurationError if vLLM shall place its ranks with Ray: the replica has their devices already."""
    if model.found.options.engine_arguments().get("distributed_executor_backend") == "ray":
        raise ConfigurationError(
            f"{model.deployment.name}: option.distributed_executor_backend = ray is not available on a cluster; remove"
            " it: a replica has the GPUs of all its ranks, and vLLM starts them as processes of its node"
        )


def _of_argument(
    argument: str, environment: Mapping[str, str], machine: Machine | None
) -> Iterator[InspectedDeployment]:
    path = Path(argument)
    if names_model_file(argument):
        for url in models_of(path) if path.is_file() else [argument]:
            yield _of_file(url, environment, machine)
    elif not path.exists():
        raise ConfigurationError(f"{path}: there is no such file or directory; name {_FORMS}{how_to_write(path)}")
    elif path.is_file():
        raise ConfigurationError(f"{path}: is no model file of Ray (.yaml); name {_FORMS}")
    elif is_one_model(path) or not any(path.iterdir()):
        yield _of_directory(path, environment, machine)
    else:
        for source in discover(path)[0]:
            yield from _of_entry(source.url, environment, machine)


_FORMS = "model directories, model files of Ray, or folders of them"


def _of_entry(url: str, environment: Mapping[str, str], machine: Machine | None) -> Iterator[InspectedDeployment]:
    """Yield the deployment of one entry of a folder, unless its file says enabled: false."""
    path = Path(url)
    if path.is_dir():
        yield _of_directory(path, environment, machine)
        return
    content = read_model_file(path).content if path.is_file() else None  # None for a model of an application
    if not isinstance(content, RayLlmFile) or content.enabled:
        yield _of_file(url, environment, machine)


def _of_directory(directory: Path, environment: Mapping[str, str], machine: Machine | None) -> InspectedDeployment:
    found = inspect_model(directory, environment, machine=machine)
    found.resolved()
    if (directory / RAY_MODEL_FILE).exists() and not (directory / "serving.properties").exists():
        return _from_file(read_model_file(directory / RAY_MODEL_FILE), found)
    return InspectedDeployment(deployment_from(found, str(directory.absolute())), found, found.warnings)


def _of_file(url: str, environment: Mapping[str, str], machine: Machine | None) -> InspectedDeployment:
    path = str(Path(url).absolute())
    try:
        directory = asyncio.run(fetch_model_directory(path, artifact_settings(None, environment)))
    except ArtifactError as error:
        raise ConfigurationError(error.message) from error
    found = inspect_model(directory, environment, machine=machine)
    found.resolved()
    return _from_file(read_model_file(directory / RAY_MODEL_FILE), found)


def _from_file(file: ModelFile, found: Inspection) -> InspectedDeployment:
    """Return the deployment that a model file describes; a replica fetches the weights that it names."""
    return InspectedDeployment(_deployment(file, found), found, file.warnings)


def _deployment(file: ModelFile, found: Inspection) -> Deployment:
    section = file.content.deployment_config
    batch = found.options.max_rolling_batch_size
    ongoing = section.max_ongoing_requests or batch
    settings = {key: source.raw for key, source in file.given.items() if key != "option.model_id"}
    deployment = Deployment(
        # As RayLLM named it: team--name-1_5 for team/name-1.5.
        name=section.name or re.sub(r"[^\w-]", "_", file.model_id.replace("/", "--"), flags=re.ASCII),
        model_id=file.model_id,
        url=found.location,
        aliases=tuple(found.options.served_model_name),
        settings=settings,
        autoscaling=_autoscaling(section, ongoing),
        num_replicas=section.num_replicas if isinstance(section.num_replicas, int) else 1,
        max_ongoing_requests=ongoing,
        max_queued_requests=-1 if section.max_queued_requests is None else section.max_queued_requests,
        actor=_actor(section.ray_actor_options or ActorSection.model_validate({})),
        accelerator_type=_accelerator_type(file.content),
        runtime_env=_runtime_environment(file.content),
        more_options={name: getattr(section, name) for name in _MORE if name in section.model_fields_set},
    )
    return _with_workers(deployment, file.content, found)


def _autoscaling(section: DeploymentSection, ongoing: int) -> Autoscaling | None:
    config = section.autoscaling_config
    if config is None and section.num_replicas != "auto":
        return None
    config = config or AutoscalingSection.model_validate({"max_replicas": _AUTO_REPLICAS})
    values = {name: getattr(config, name) for name in Autoscaling.__dataclass_fields__}
    values["upscaling_factor"] = config.upscaling_factor or config.smoothing_factor
    values["downscaling_factor"] = config.downscaling_factor or config.smoothing_factor
    values["policy"] = config.policy or AUTOSCALING_POLICY
    values["target_ongoing_requests"] = config.target_ongoing_requests or max(1.0, round(ongoing * ONGOING_SHARE))
    return Autoscaling(**values)


def _actor(section: ActorSection) -> ActorOptions:
    return ActorOptions(
        num_cpus=section.num_cpus or 0,
        num_gpus=section.num_gpus or 0,
        memory=section.memory,
        resources=section.resources,
        accelerator_type=section.accelerator_type,
        label_selector=section.label_selector,
        fallback_strategy=None if section.fallback_strategy is None else tuple(section.fallback_strategy),
    )


def _accelerator_type(content: RayLlmFile | LlmConfigFile) -> str | None:
    if isinstance(content, LlmConfigFile):
        return content.accelerator_type
    resources = content.scaling_config.resources_per_worker
    return next((name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)), None)


def _runtime_environment(content: RayLlmFile | LlmConfigFile) -> dict[str, Any]:
    own = content.engine_config.runtime_env if isinstance(content, RayLlmFile) else content.runtime_env or {}
    actor = content.deployment_config.ray_actor_options
    return {**own, **((actor.runtime_env if actor is not None else None) or {})}


def _with_workers(deployment: Deployment, content: RayLlmFile | LlmConfigFile, found: Inspection) -> Deployment:
    """Return the deployment with the workers that the file asks for, or with explicit bundles."""
    section = content.deployment_config
    explicit, strategy = section.placement_group_bundles, section.placement_group_strategy
    if isinstance(content, RayLlmFile):
        scaling = content.scaling_config
        resources = {"CPU": scaling.num_cpus_per_worker, "GPU": scaling.num_gpus_per_worker}
        bundle = {name: amount for name, amount in resources.items() if amount} | scaling.resources_per_worker
        workers, strategy = scaling.num_workers, strategy or scaling.placement_strategy
    else:
        group = content.placement_group_config
        explicit = explicit or (None if group is None else group.bundles)
        workers = found.options.devices_per_worker or 1
        bundle = _bundle(content)
        strategy = strategy or ("STRICT_PACK" if group is None else group.strategy)
    if explicit:
        return in_bundles(deployment, explicit, strategy)
    return with_workers(deployment, workers, bundle, strategy)


def _bundle(content: LlmConfigFile) -> dict[str, float]:
    """Return what a worker of an LLMConfig takes: a GPU, unless the file says kind: cpu."""
    group = content.placement_group_config
    named = accelerator_resource(content.accelerator_type)
    if group is not None and group.bundle_per_worker is not None:
        return {**named, **group.bundle_per_worker}
    on_cpu = content.accelerator_config.get("kind") == "cpu"
    return {"CPU": 1, **({} if on_cpu else {"GPU": 1}), **named}
