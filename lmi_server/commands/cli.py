"""The command line and composition root: the only module of `lmi_server` that imports the front end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from frontend.observability.server_log import formatter
from lmi_server.artifacts.location import MODEL_FORMS, names_model_file
from lmi_server.client import numbers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.commands.late_commands import WithLateCommands
from lmi_server.configuration.choice.model_layers import SERVING_PROPERTIES
from lmi_server.configuration.handlers import DESCRIBE_GPUS, HANDLERS
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.configuration.server_settings import (
    ServerSettings,
    find_config_file,
    model_defaults,
    resolve_server,
    server_home,
)
from lmi_server.contract.errors import ConfigurationError, LmiServerError
from lmi_server.contract.texts.quoting import as_record, excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.explain.explanation import Explanation, file_problems
from lmi_server.explain.explanation import explain as explain_model
from lmi_server.explain.findings import Finding, annotation, finding, findings
from lmi_server.features import load as load_by_name
from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.devices import nvidia_driver
from lmi_server.machine.environment import is_multi_model, log_format, log_stream, process_environment, set_region
from lmi_server.machine.inventory import this_machine, with_gpu_memory
from lmi_server.processes import model_imports
from lmi_server.processes.descriptors import send_errors_to_output
from lmi_server.serving.models.model_store import ModelSource, Startup, is_spec, startup_sources

app = typer.Typer(
    name="lmi-server",
    cls=WithLateCommands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

logger = logging.getLogger(__name__)
_ONE_MODEL = f"Model: {MODEL_FORMS}. It is fetched first if it is not on this machine."
_HELP = {
    option.field: f"{option.description} (default: {option.default})" for option in ServerSettings.declared_options()
}


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _refuse_other_systems(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serves the models of directories that hold a serving.properties, over HTTP."""
    if sys.platform != "linux":
        typer.echo(
            f"lmi-server runs on Linux, and this is {sys.platform}: use a Linux container or virtual machine.", err=True
        )
        raise typer.Exit(1)


@app.command()
def serve(
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help=f"Models: {MODEL_FORMS}. A name may stand before it, name=MODEL. A directory that exists wins over a "
            "model of the Hub with the same name.",
        ),
    ] = None,
    model_store: Annotated[str | None, typer.Option("--model-store", "-s", help=_HELP["model_store"])] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--models",
            "-m",
            help="Models: url, name=url or [name:version:engine:devices]=url; of the store, only these are loaded.",
        ),
    ] = None,
    load_models: Annotated[str | None, typer.Option(help=_HELP["load_models"])] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config-file", "-f", help="Settings of the server: LMI's config.properties.")
    ] = None,
    host: Annotated[str | None, typer.Option(help=_HELP["host"])] = None,
    port: Annotated[int | None, numbers.port(_HELP["port"])] = None,
    drain_timeout: Annotated[float | None, numbers.delay("--drain-timeout", _HELP["drain_timeout"])] = None,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Serve the others if a model cannot be loaded."),
    ] = False,
    log_level: Annotated[str | None, typer.Option(help=_HELP["log_level"])] = None,
) -> None:
    """Serve models until SIGTERM or SIGINT: those of the arguments, a model store, --models and HF_MODEL_ID."""
    # Imported late: `explain` and `check` need neither the front end nor uvicorn.
    from frontend.server import run

    set_region()
    environment = process_environment()
    flags = {
        "model_store": model_store,
        "load_models": load_models,
        "host": host,
        "port": port,
        "drain_timeout": drain_timeout,
        "wait_model_loading": False if keep_going else None,
        "log_level": log_level,
    }
    _choose_stream(log_stream(environment))
    _log_to_stderr("info", log_format(environment))
    with _startup_errors(log_format(environment)):
        config_file = config_file or find_config_file(environment, Path.cwd())
        settings, setting_warnings = resolve_server(environment, flags, config_file)
    _choose_stream(settings.log_stream)
    _log_to_stderr(settings.log_level, settings.log_format)
    with _startup_errors(settings.log_format), _named_paths():
        if config_file is not None:
            environment = {**model_defaults(config_file), **environment}
        startup = _startup(directories or (), models or (), settings, environment)
        sources, warnings = startup_sources(startup, environment)
        if settings.require_model and not sources and warnings and not is_multi_model(environment):
            raise ConfigurationError(f"require_model is set, and there is no model: {'; '.join(warnings)}")
        if startup.directories and len(sources) == 1:
            _check_directory(sources[0], environment)
    if config_file is not None:
        logger.info("settings are read from %s", config_file)
    for warning in (*setting_warnings, *warnings):
        logger.warning(warning)
    raise typer.Exit(run(sources, settings, environment))


def _check_directory(source: ModelSource, environment: Mapping[str, str]) -> None:
    """Report errors of a single model before the server starts; an archive is read only when it is loaded."""
    if names_model_file(source.url):
        from lmi_server.commands.local_model import inspect_local, local_model

        local = replace(local_model(source.url, environment), variables=source.variables)
        _raise_problems(inspect_local(local, environment))
    elif not Path(source.url).is_file():
        _raise_problems(inspect_model(Path(source.url), {**environment, **source.variables}))


def _raise_problems(found: Inspection) -> None:
    """Raise the errors of `check`, without the time that a load takes to come upon them."""
    problems = (*found.problems, *found.unavailable) or file_problems(found)
    if problems:
        raise ConfigurationError.from_problems(problems)


def _startup(
    arguments: Sequence[str], models: Sequence[str], settings: ServerSettings, environment: Mapping[str, str]
) -> Startup:
    """Return the models that the command line and the settings ask for.

    LMI's -m takes several models; all but the first are arguments here.
    """
    directories = [Path(text) for text in arguments if not is_spec(text)]
    specs = [*models, *filter(is_spec, arguments)]
    store = None if settings.model_store is None else server_home(environment, Path.cwd()) / settings.model_store
    return Startup(directories, specs, store, settings.load_models)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_ONE_MODEL)],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: every key, and machine-readable values.")
    ] = False,
    with_defaults: Annotated[bool, typer.Option("--all", help="Show the keys that have their defaults too.")] = False,
) -> None:
    """Show the handler, the value and the source of every key that is set, and the consequences; loads no model."""
    explanation = _explain(model)
    if as_json:
        typer.echo(json.dumps(explanation.as_json_values(), indent=2, default=sorted))
    else:
        from lmi_server.explain.report import print_explanation

        print_explanation(explanation, Console(), with_defaults)
    raise typer.Exit(1 if explanation.problems else 0)


@app.command()
def check(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help=f"{_ONE_MODEL} The serving.properties of a directory stands for it."),
    ],
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="Models for another machine: code 0 in place of 2, so that code 1 counts."),
    ] = False,
    github: Annotated[
        bool, typer.Option("--github", help="Print annotations of GitHub's workflows, which it shows beside the files.")
    ] = False,
) -> None:
    """Check configuration and files of models, without loading them.

    Exit codes: 0 valid, 1 wrong, 2 valid but not served by this version or on this machine.
    """
    codes = {_check_one(model, github) for model in models}
    code = 1 if 1 in codes else max(codes)
    raise typer.Exit(0 if code == 2 and elsewhere else code)


def _check_one(model: str, github: bool) -> int:
    """Print what is wrong with a model, and return the exit code that it alone would have."""
    path = Path(model)
    try:
        explained = _explanation(str(path.parent) if path.name == SERVING_PROPERTIES and path.is_file() else model)
    except ConfigurationError as error:
        _print_findings([finding("error", line) for line in SECRETS.mask(error.message).splitlines()], github)
        return 1
    _print_findings(list(findings(explained)), github)
    if explained.problems or explained.files:
        return 1
    if not explained.can_be_served:
        return 2
    if not github:  # a model's name may begin like a command of a workflow
        count = len(explained.warnings)
        typer.echo(f"{model}: {count} {'warning' if count == 1 else 'warnings'}, no problem")
    return 0


def _print_findings(found: Sequence[Finding], github: bool) -> None:
    console = Console(stderr=True)
    for each in found:
        if github:
            typer.echo(annotation(each))
        else:
            style = "yellow" if each.severity == "warning" else "red"
            console.print(as_record(each.message), style=style, markup=False, highlight=False, soft_wrap=True)


@app.command()
def devices() -> None:
    """Show the GPUs of this machine with driver and free memory, and whether torch can use them.

    Exit codes: 0 torch can use them, or there are none; 2 it cannot.
    """
    environment = process_environment()
    machine = with_gpu_memory(this_machine(environment), environment)
    typer.echo(nvidia_driver() or "NVIDIA's driver is not loaded")
    for gpu in machine.gpus:
        sizes = [f"{size / 2**30:.1f} GiB {kind}" for size, kind in _sizes(gpu) if size is not None]
        typer.echo(f"{machine.gpu_accelerator.noun} {gpu.name}: {', '.join(sizes) or 'its memory was not measured'}")
    if not machine.gpus:
        typer.echo("no GPU is visible: models run on the CPU")
    try:
        describe = cast("Callable[[], tuple[list[str], str | None]]", load_by_name(DESCRIBE_GPUS))
        lines, fault = describe()
    except ImportError as error:
        lines, fault = [f"torch is not installed: {error}"], None
    for line in lines:
        typer.echo(line)
    if fault is not None:
        Console(stderr=True).print(fault, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2)


def _sizes(gpu: Gpu) -> Sequence[tuple[int | None, str]]:
    return (gpu.free_bytes, "free"), (gpu.total_bytes, "in all")


def _explain(argument: str) -> Explanation:
    with plain_configuration_errors():
        return _explanation(argument)


def _explanation(argument: str) -> Explanation:
    """Explain the model that `argument` names. Raises ConfigurationError."""
    from lmi_server.commands.local_model import inspect_local, local_model

    environment = process_environment()
    SECRETS.add_named(environment)
    model = local_model(argument, environment)
    machine = with_gpu_memory(this_machine(environment, HANDLERS.engines()), environment)
    return explain_model(inspect_local(model, environment, machine))


@app.command("test-model")
def try_model(
    model_dir: Annotated[Path, typer.Option(help="Model directory.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="Body of the request: a file or a text; name=value or name=file for one of several parts."
        ),
    ] = None,
    parameters: Annotated[list[str] | None, typer.Option(help="A property of the request: name=value.")] = None,
    handler: Annotated[str | None, typer.Option(help="Function of the entry point, instead of option.handler.")] = None,
    entry_point: Annotated[str | None, typer.Option(help="Instead of option.entryPoint.")] = None,
) -> None:
    """Load a model in a worker, send it one request without a server, and print the answer."""
    from lmi_server.commands.test_model import run_once

    settings = {"option.handler": handler, "option.entryPoint": entry_point}
    source = ModelSource(str(model_dir), "model", settings={key: value for key, value in settings.items() if value})
    _log_to_stderr("warning")
    with plain_configuration_errors():
        raise typer.Exit(run_once(source, inputs or [], parameters or [], process_environment()))


@app.command("partition")
def partition_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_ONE_MODEL)],
    save: Annotated[Path, typer.Option(help="Model directory to create.")],
) -> None:
    """Split or quantise the weights of a model ahead of time, so that a later start only loads."""
    from lmi_server.commands.local_model import local_model
    from lmi_server.commands.partition import partition

    _log_to_stderr("info")
    environment = process_environment()
    with plain_configuration_errors():
        try:
            partition(local_model(model, environment), save, environment)
        except LmiServerError as error:
            raise ConfigurationError(error.message) from error
    typer.echo(f"{save}: serve it with lmi-server serve {save}")


@app.command("demo-model")
def demo_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to create; a complete one is kept.")],
) -> None:
    """Build the demo model, SmolLM2-135M-Instruct, as a Hugging Face directory with a serving.properties."""
    from lmi_server.commands.demo_model import build_demo_model

    model_imports.prepare()
    with plain_configuration_errors():
        built = build_demo_model(directory)
    typer.echo(f"{directory}: {'built' if built else 'complete, nothing to do'}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(distribution_version("lmi-server"))


def _choose_stream(name: str) -> None:
    """Send the log, and messages about what is wrong, to the standard output if the setting log_stream says so."""
    if name == "stdout":
        send_errors_to_output()


def _log_to_stderr(level: str, written_as: str = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(written_as))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


@contextlib.contextmanager
def _startup_errors(written_as: str) -> Iterator[None]:
    """Exit with code 1 at a ConfigurationError: its message is a record of the log if that is in JSON."""
    if written_as != "json":
        with plain_configuration_errors():
            yield
        return
    try:
        yield
    except ConfigurationError as error:
        logger.error("%s", error.message)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def _named_paths() -> Iterator[None]:
    """Raise ConfigurationError for a path that cannot be looked up, as below a directory of another user."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        where = excerpt(os.fsdecode(error.filename))
        reason = f"{error.strerror}; this server runs as the user {os.getuid()}"
        raise ConfigurationError(f"{where}: cannot be looked up: {reason}") from error


if __name__ == "__main__":
    app()
