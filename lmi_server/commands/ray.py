"""`lmi-server ray`: models on a cluster of Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lmi_server.commands.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.environment import process_environment
from lmi_server.ray.deployment import Deployment, deployment_of

app = typer.Typer(name="ray", no_args_is_help=True, help="Serve models on a cluster of Ray.")

NOT_INSTALLED = "Ray is not installed; pip install lmi-server[ray] brings it"


@app.command()
def deploy(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Model directories.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    front_ends: Annotated[int, typer.Option(help="Number of front ends, each on another node.")] = 1,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests have when what serves them ends.")] = 60,
) -> None:
    """Serve models as one application of Ray Serve, on the cluster that RAY_ADDRESS names or on a local one."""
    with plain_configuration_errors():
        environment = process_environment()
        deployments = [_deployment(model, environment) for model in models]
        try:
            from lmi_server.ray import cluster
            from lmi_server.ray.application import IngressSettings
        except ImportError as error:
            raise ConfigurationError(NOT_INSTALLED) from error
        settings = IngressSettings(host, port, front_ends, drain_timeout)
        for line in cluster.deploy(deployments, settings, environment):
            typer.echo(line)


@app.command()
def status() -> None:
    """Print the state of the application on the cluster that RAY_ADDRESS names, as JSON."""
    with plain_configuration_errors():
        try:
            from lmi_server.ray import cluster
        except ImportError as error:
            raise ConfigurationError(NOT_INSTALLED) from error
        typer.echo(json.dumps(cluster.status(process_environment()), indent=2))


def _deployment(model: Path, environment: Mapping[str, Any]) -> Deployment:
    if not model.is_dir():
        raise ConfigurationError(f"{model}: there is no such directory")
    return deployment_of(model, environment)
