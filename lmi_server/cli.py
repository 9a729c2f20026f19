"""The command line, and the composition root: the only place of `lmi_server` that knows the front end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmi_server.configuration.environment import process_environment
from lmi_server.configuration.resolve import resolve_model
from lmi_server.configuration.server import ServerSettings, resolve_server
from lmi_server.errors import ConfigurationError

app = typer.Typer(name="lmi-server", help="Serves the model of a directory over HTTP.", no_args_is_help=True)

_log = logging.getLogger(__name__)
_HELP = {option.field: f"{option.description} (default: {option.default})" for option in ServerSettings.declared()}


@app.command()
def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory with a serving.properties.")],
    host: Annotated[str | None, typer.Option(help=_HELP["host"])] = None,
    port: Annotated[int | None, typer.Option(help=_HELP["port"])] = None,
    drain_timeout: Annotated[float | None, typer.Option(help=_HELP["drain_timeout"])] = None,
    log_level: Annotated[str | None, typer.Option(help=_HELP["log_level"])] = None,
) -> None:
    """Serve the model of a directory until SIGTERM or SIGINT."""
    from frontend.server import run

    environment = process_environment()
    flags = {"host": host, "port": port, "drain_timeout": drain_timeout, "log_level": log_level}
    with _plain_configuration_errors():
        settings, doubtful = resolve_server(environment, flags)
        model = resolve_model(directory, environment)
    _log_to_stderr(settings.log_level)
    for warning in (*doubtful, *model.warnings):
        _log.warning(warning)
    raise typer.Exit(run([model], settings))


@app.command("demo-model")
def demo_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make; kept where it is complete.")],
) -> None:
    """Build the demo model, SmolLM2-135M-Instruct, as a Hugging Face directory with a serving.properties."""
    from lmi_server.demo_model import build_demo_model

    with _plain_configuration_errors():
        built = build_demo_model(directory)
    typer.echo(f"{directory}: {'built' if built else 'complete, nothing to do'}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(distribution_version("lmi-server"))


@contextmanager
def _plain_configuration_errors() -> Iterator[None]:
    """Print a ConfigurationError as it is, without a traceback, and exit with 1."""
    try:
        yield
    except ConfigurationError as error:
        # soft_wrap: one problem is one line, however narrow the terminal; the text may hold [brackets].
        Console(stderr=True).print(error.message, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


if __name__ == "__main__":
    app()
