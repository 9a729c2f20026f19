"""The application of Ray Serve: one deployment for each model, and one for the front ends before them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.serve import Application

from lmi_server.ray.actors.ingress import Ingress
from lmi_server.ray.actors.replica import Replica
from lmi_server.ray.deployments.deployment import Deployment

INGRESS = "front-end"

_ON_HEAD = {"node:__internal_head__": 0.001}
_END_S = 10.0  # beyond the limit of the drain, for Ray's own steps
_OF_DECORATOR = ("rolling_update_percentage",)  # `Deployment.options` does not take it
_ROUTER = {"request_router_class": "lmi_server.ray.actors.request_router.AnnouncingRouter"}


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Where the front ends listen. A single one is on the head node, several are on different nodes.

    With `port` 0 each of them takes a port that is free.

    A request that runs when its replica or its front end is to end gets `drain_timeout_s` seconds.
    """

    host: str = "0.0.0.0"
    port: int = 8080
    count: int = 1
    drain_timeout_s: float = 60.0


def application(models: Sequence[Deployment], settings: IngressSettings) -> Application:
    """Return the application that serves `models`."""
    replicas = [_replica(model, settings.drain_timeout_s) for model in models]
    options = {
        "name": INGRESS,
        "num_replicas": settings.count,
        "max_replicas_per_node": 1,
        "max_ongoing_requests": 1000,
        "ray_actor_options": {"num_cpus": 0, **({"resources": _ON_HEAD} if settings.count == 1 else {})},
        "graceful_shutdown_timeout_s": settings.drain_timeout_s + _END_S,
        "user_config": {"models": [_announcement(model) for model in models]},
        "version": _digest(settings, version("lmi-server")),
    }
    front_ends = _with_options(Ingress, options)
    return cast(Application, front_ends.bind(settings.host, settings.port, settings.drain_timeout_s, *replicas))


def _replica(model: Deployment, drain_timeout_s: float) -> Application:
    options = model.options() | {"request_router_config": _ROUTER}
    drain_timeout_s = options.get("graceful_shutdown_timeout_s", drain_timeout_s)
    options["graceful_shutdown_timeout_s"] = drain_timeout_s + _END_S
    start = {
        "url": model.url,
        "name": model.path_name,
        "settings": dict(model.settings),
        "drain_timeout_s": drain_timeout_s,
    }
    options["version"] = _digest(start, model.runtime_env, _contents(model.url), version("lmi-server"))
    return cast(Application, _with_options(Replica, options).bind(start))


def _with_options(actor: type, options: Mapping[str, Any]) -> serve.Deployment:
    first = {name: value for name, value in options.items() if name in _OF_DECORATOR}
    others = {name: value for name, value in options.items() if name not in _OF_DECORATOR}
    # Without a version of ours, Ray replaces every replica at each deployment, whether anything has changed or not.
    return serve.deployment(actor, **first).options(**others, _internal=True)


def _announcement(model: Deployment) -> dict[str, Any]:
    scaled = model.autoscaling
    fixed = model.num_replicas
    low, high = (fixed, fixed) if scaled is None else (scaled.min_replicas, scaled.max_replicas)
    names = {"deployment": model.name, "name": model.path_name, "aliases": list(model.aliases)}
    return {**names, "min_replicas": low, "max_replicas": high}


def _contents(url: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file in a model directory: a change of one replaces the replicas."""
    directory = Path(url)
    files = sorted(path for path in directory.iterdir() if path.is_file()) if directory.is_dir() else []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
