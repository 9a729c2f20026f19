"""`lmi-server migrate`: writes serving.properties from the configuration of another model server."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lmi_server.artifacts.location import MODEL_FILE_SUFFIXES
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.configuration.choice.model_layers import SERVING_PROPERTIES
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.model_file.positions import parse_documents
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.files.whole_files import write_text
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine
from lmi_server.migrate.containers import from_command, from_compose, from_kserve, from_words
from lmi_server.migrate.documents import (
    from_modelfile,
    from_sagemaker,
    from_torchserve,
    from_triton,
    json_object,
    read_text,
)
from lmi_server.migrate.migration import Kind, Migration, display_text

_STYLES: Mapping[Kind, str] = {"carried": "green", "differs": "yellow", "not carried": "red"}
_FROM = re.compile(r"(?im)\A(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*FROM[ \t]")
_ZIP = b"PK\x03\x04"


def migrate(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|COMMAND",
            help="A command line of vLLM, SGLang or text-generation-inference, in quotes or behind --; or a file: a"
            " script, a compose file, DescribeModel's JSON, an InferenceService, a Modelfile, a .mar; or the directory"
            " of a Triton model.",
        ),
    ],
    to: Annotated[
        Path | None, typer.Option(help="Model directory for the serving.properties; standard output if not given.")
    ] = None,
    service: Annotated[str | None, typer.Option(help="The service of a compose file, if several serve models.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a serving.properties that is there.")] = False,
) -> None:
    """Write serving.properties from another server's configuration, and say what of it is carried over; run nothing."""
    with plain_configuration_errors():
        environment = process_environment()
        SECRETS.add_named(environment)
        migration = migration_of(source, service)
        said = migration.settle(this_machine(environment, HANDLERS.engines()), {}, to)
        if to is not None:
            _write(to, migration.text(), force)
    _report(migration, said)
    if to is None:
        typer.echo(migration.text(), nl=False)


def migration_of(source: Sequence[str], service: str | None = None) -> Migration:
    """Return the migration of a file, a directory or a command. Raises ConfigurationError if it is not known."""
    if len(source) > 1:
        return from_words(source)
    path = Path(source[0])
    if _exists(path):
        return from_triton(path) if path.is_dir() else _of_file(path, service)
    return from_command(source[0])


def _exists(path: Path) -> bool:
    """Return whether there is this file; a command without a slash may be too long for the name of one."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error


def _of_file(path: Path, service: str | None) -> Migration:
    try:
        with path.open("rb") as file:
            head = file.read(len(_ZIP))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    if head == _ZIP:
        return from_torchserve(path)
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return from_sagemaker(json_object(text))
    if path.suffix in MODEL_FILE_SUFFIXES:
        return _of_yaml(path, text, service)
    return from_modelfile(text) if _FROM.match(text) else from_command(text)


def _of_yaml(path: Path, text: str, service: str | None) -> Migration:
    documents: list[Any] = [document.data for document in parse_documents(text, str(path))]
    for data in documents:
        if isinstance(data, dict) and data.get("kind") == "InferenceService":
            return from_kserve(data)
        if isinstance(data, dict) and "services" in data:
            return from_compose(data, service)
    raise ConfigurationError(
        f"{path}: is neither a compose file nor an InferenceService; model files of Ray are served as they are"
    )


def _write(directory: Path, text: str, force: bool) -> None:
    path = directory / SERVING_PROPERTIES
    if path.exists() and not force:
        raise ConfigurationError(f"{path}: is there already; --force writes over it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{directory}: cannot be made: {error.strerror}") from error
    write_text(path, text)


def _report(migration: Migration, said: Sequence[str]) -> None:
    """Print a line for each part of the source, and what `check` says of the result."""
    console = Console(stderr=True)
    for note in migration.notes:
        line = f"{note.kind:<12} {note.origin}: {note.text}"
        console.print(line, style=_STYLES[note.kind], markup=False, highlight=False, soft_wrap=True)
    for text in said:
        console.print(f"{'check':<12} {display_text(text)}", markup=False, highlight=False, soft_wrap=True)
