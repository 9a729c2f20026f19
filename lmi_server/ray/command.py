"""`lmi-server ray`: models on a cluster of Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from lmi_server.client import numbers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.whole_files import write_text
from lmi_server.machine.environment import process_environment, set_variables
from lmi_server.ray.deployments.model_files import deployments, inspect_deployments
from lmi_server.ray.serve_config import serve_config

app = typer.Typer(name="ray", no_args_is_help=True, help="Serve models on a cluster of Ray.")

_MODELS = "Model directories, model files of Ray (RayLLM's YAML, LLMConfig), and folders of them."
_HOST = "Address to listen on."
_PORT = "Port to listen on; 0 for any that is free."
_FRONT_ENDS = "Number of front ends, each on another node."
_DRAIN = "Seconds that requests have when what serves them ends."
NOT_INSTALLED = "Ray is not installed; pip install lmi-server[ray] brings it"
MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"


@app.command()
def deploy(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=_MODELS)],
    host: Annotated[str, typer.Option(help=_HOST)] = "0.0.0.0",
    port: Annotated[int, numbers.port(_PORT)] = 8080,
    front_ends: Annotated[int, numbers.count("--front-ends", _FRONT_ENDS)] = 1,
    drain_timeout: Annotated[float, numbers.delay("--drain-timeout", _DRAIN)] = 60,
) -> None:
    """Serve models as one application of Ray Serve, on the cluster that RAY_ADDRESS names or on a local one."""
    with plain_configuration_errors():
        environment = process_environment()
        found = deployments(models, environment)
        cluster = _cluster(environment)
        settings = cluster.IngressSettings(host, port, front_ends, drain_timeout)
        for line in cluster.deploy(found, settings, environment):
            typer.echo(line)


@app.command()
def status() -> None:
    """Print the state of the application on the cluster that RAY_ADDRESS names, as JSON."""
    with plain_configuration_errors():
        environment = process_environment()
        typer.echo(json.dumps(_cluster(environment).status(environment), indent=2))


def _cluster(environment: Mapping[str, str]) -> ModuleType:
    """Import Ray, once its variables are set, and return `cluster`. Raises ConfigurationError without Ray."""
    if environment.get("RAY_ADDRESS"):
        send_token(environment)
    try:
        from lmi_server.ray import cluster
    except ImportError as error:
        raise ConfigurationError(NOT_INSTALLED) from error
    return cluster


@app.command()
def explain(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=_MODELS)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the resolved deployments, their placement groups and engine arguments, without a cluster."""
    from lmi_server.ray.deployments.explanation import as_lines, as_values

    with plain_configuration_errors():
        found = inspect_deployments(models, process_environment())
    if as_json:
        typer.echo(json.dumps([as_values(model) for model in found], indent=2, default=str))
        return
    for number, model in enumerate(found):
        typer.echo("\n".join((*([""] if number else []), *as_lines(model))))


@app.command()
def build(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=_MODELS)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; otherwise it is printed.")
    ] = None,
    host: Annotated[str, typer.Option(help=_HOST)] = "0.0.0.0",
    port: Annotated[int, numbers.port(_PORT)] = 8080,
    front_ends: Annotated[int, numbers.count("--front-ends", _FRONT_ENDS)] = 1,
    drain_timeout: Annotated[float, numbers.delay("--drain-timeout", _DRAIN)] = 60,
) -> None:
    """Write the Serve config file of the models, for Ray's `serve deploy`."""
    with plain_configuration_errors():
        found = deployments(models, process_environment())
    # JSON is YAML too, and needs no package.
    text = json.dumps(serve_config(found, host, port, front_ends, drain_timeout), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        with plain_configuration_errors():
            write_text(output, text)
        typer.echo(f"{output}: run serve deploy {output}")


@app.command("model-files")
def write_model_files(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Files such as llama-3.1-8b_a10g_tp1.yaml; all if none is named."),
    ] = None,
) -> None:
    """Write the model files of Ray that are recommended for known models, by accelerator and number of devices."""
    from lmi_server.ray.recommendation.files import write_files

    with plain_configuration_errors():
        written = write_files(folder, names or ())
    typer.echo(f"{folder}: {len(written)} model files; none was measured, so load-test the one that you serve")


def send_token(environment: Mapping[str, str]) -> None:
    """Have Ray send this user's token to the cluster that it joins, if the user has one and RAY_AUTH_MODE is not set.

    Ray makes a token in the home directory with the first cluster that it starts, and later clusters ask for it. But
    Ray sends it only with RAY_AUTH_MODE=token, so that a user could join the first cluster and not the next one. A
    cluster that asks for no token accepts one, but its answers have none and this process takes none of them: `deploy`
    ends then with the remedy. Call this before Ray is imported, which reads the variable. See "Ray token
    authentication" in Ray's documentation.
    """
    if MODE not in environment and _has_token(environment):
        set_variables({MODE: "token"})


def _has_token(environment: Mapping[str, str]) -> bool:
    if environment.get(_TOKEN):
        return True
    own = Path(environment.get("HOME") or "~").expanduser() / ".ray" / "auth_token"
    return Path(environment.get(_TOKEN_FILE) or own).is_file()
