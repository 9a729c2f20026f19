"""The Serve config file of models, for Ray's `serve deploy`, and the builder of the application that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lmi_server.ray.deployments.deployment import APPLICATION, Deployment, plain

if TYPE_CHECKING:
    from ray.serve import Application


_BUILDER = f"{__name__}:build"


def serve_config(
    models: Sequence[Deployment], host: str, port: int, front_ends: int, drain_timeout: float
) -> dict[str, Any]:
    """Return the content of the file. It holds the models as they are resolved, since nodes need not have their files.

    Ray's own proxies are off: the front ends of the application take the requests.
    """
    front_end = {"host": host, "port": port, "count": front_ends, "drain_timeout_s": drain_timeout}
    application = {
        "name": APPLICATION,
        "route_prefix": None,
        "import_path": _BUILDER,
        "args": {"models": [plain(model) for model in models], "front_end": front_end},
    }
    return {"proxy_location": "Disabled", "applications": [application]}


def build(args: Mapping[str, Any]) -> Application:
    """Return the application for the `args` of the file. Ray calls it on the cluster."""
    from lmi_server.ray.application import IngressSettings, application

    models = msgspec.convert(args["models"], tuple[Deployment, ...])
    return application(models, msgspec.convert(args["front_end"], IngressSettings))
