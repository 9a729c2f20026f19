"""What `lmi-server ray explain` shows of deployments, as text and as values of JSON. It needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.ray.deployments.deployment import Deployment, plain
from lmi_server.ray.deployments.model_files import InspectedDeployment


def as_values(model: InspectedDeployment) -> dict[str, Any]:
    """Return the resolved deployment, what a replica takes of the cluster, and the arguments of its engine."""
    values = {
        **plain(model.deployment),
        "serve_options": model.deployment.options(),
        "handler": model.found.spec.title,
        "engine_arguments": dict(model.found.options.engine_arguments()),
        "warnings": list(model.warnings),
    }
    masked = _mask(values)
    assert isinstance(masked, dict), "masking keeps the form"
    return masked


def as_lines(model: InspectedDeployment) -> Iterator[str]:
    """Yield the lines of the text."""
    deployment = model.deployment
    yield f"{deployment.name}: {deployment.url}"
    yield f"  requests name it      {', '.join(deployment.names)}"
    yield f"  handler               {model.found.spec.title}"
    yield f"  replicas              {_replicas(deployment)}"
    yield f"  ongoing requests      {deployment.max_ongoing_requests} per replica, {_queue_limit(deployment)}"
    yield f"  workers of a replica  {deployment.num_workers}"
    yield f"  actor of a replica    {_amounts(deployment.actor.options())}"
    if deployment.placement is not None:
        yield f"  placement group       {deployment.placement.strategy}"
        yield from (
            f"    bundle {index}: {_amounts(bundle)}" for index, bundle in enumerate(deployment.placement.bundles)
        )
    yield from _section("runtime_env", deployment.runtime_env)
    yield from _section("further options of Ray Serve", deployment.more_options)
    yield from _section("keys of serving.properties", deployment.settings)
    yield from _section("engine arguments", model.found.options.engine_arguments())
    yield from (f"  warning: {warning}" for warning in model.warnings)


def _section(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    for number, (name, value) in enumerate(values.items()):
        if not number:
            yield f"  {title}"
        yield SECRETS.mask(f"    {name} = {_one_line(value)}")


def _one_line(value: Any) -> str:
    return str(value).replace("\n", "\\n")


def _replicas(deployment: Deployment) -> str:
    scaling = deployment.autoscaling
    if scaling is None:
        return str(deployment.num_replicas)
    first = "" if scaling.initial_replicas is None else f", {scaling.initial_replicas} at first"
    target = f"{scaling.target_ongoing_requests:g}" if scaling.target_ongoing_requests is not None else "2"
    return f"{scaling.min_replicas} to {scaling.max_replicas}{first}, for {target} ongoing requests each"


def _queue_limit(deployment: Deployment) -> str:
    return (
        "no limit on waiting ones" if deployment.max_queued_requests < 0 else f"{deployment.max_queued_requests} wait"
    )


def _amounts(amounts: Mapping[str, Any]) -> str:
    flat = {**amounts, **amounts.get("resources", {})}
    return ", ".join(f"{name} {amount}" for name, amount in flat.items() if name != "resources") or "nothing"


def _mask(value: Any) -> Any:
    match value:
        case str():
            return SECRETS.mask(value)
        case dict():
            return {key: _mask(part) for key, part in value.items()}
        case list() | tuple():
            return [_mask(part) for part in value]
    return value
