"""A cluster of Ray: joined, or started on this machine; deployed to, and asked how it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import serve

from lmi_server.contract.errors import ConfigurationError
from lmi_server.ray.application import INGRESS, IngressSettings, application
from lmi_server.ray.deployment import APPLICATION, Deployment

ADDRESS = "RAY_ADDRESS"
EVERYWHERE = ("0.0.0.0", "::")


def deploy(models: Sequence[Deployment], settings: IngressSettings, environment: Mapping[str, str]) -> Iterator[str]:
    """Deploy `models` on the cluster that RAY_ADDRESS names; yield lines about it.

    Without RAY_ADDRESS a local cluster is started, which lives until SIGTERM or SIGINT. Raises ConfigurationError.
    """
    address = environment.get(ADDRESS)
    _join(address)
    try:
        # The front ends of this project take the requests; Ray's proxies would only take a port.
        serve.start(proxy_location="Disabled")
        serve.run(application(models, settings), name=APPLICATION, route_prefix=None)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(f"the models cannot be deployed: {error}") from error
    front_end = serve.get_deployment_handle(INGRESS, APPLICATION).remote().result()
    host = front_end["host"] if settings.host in EVERYWHERE else settings.host
    yield f"serving {', '.join(model.model_id for model in models)} on http://{host}:{front_end['port']}"
    if address is None:
        yield "this process keeps the cluster; SIGTERM or SIGINT ends it"
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        serve.shutdown()
        ray.shutdown()


def status(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return how the application is: its state, its front ends, and the replicas of each model.

    Raises ConfigurationError if there is no cluster, or nothing is deployed on it.
    """
    if ADDRESS not in environment:
        raise ConfigurationError(f"{ADDRESS} is not set; set it to the address of the cluster, or to auto")
    _join(environment[ADDRESS])
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        raise ConfigurationError("nothing is deployed on the cluster; run lmi-server ray deploy")
    return {
        "status": found.status.value,
        **({"message": found.message} if found.message else {}),
        "deployments": {
            name: {
                "status": deployment.status.value,
                "replicas": dict(deployment.replica_states),
                **({"message": deployment.message} if deployment.message else {}),
            }
            for name, deployment in found.deployments.items()
        },
    }


def _join(address: str | None) -> None:
    """Join the cluster at `address`, or start one if it is None. Raises ConfigurationError if there is none."""
    # By themselves, the processes that Ray starts give way to all others (a niceness of 15).
    own: dict[str, Any] = {"address": "local", "log_to_driver": True, "_system_config": {"worker_niceness": 0}}
    try:
        ray.init(namespace="lmi-server", **({"address": address, "log_to_driver": False} if address else own))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"{ADDRESS} = {address or ''}: the cluster cannot be joined; {error}") from error
