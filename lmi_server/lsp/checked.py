"""Checks the text of an open document with the functions of `lmi-server check`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmi_server.artifacts.location import MODEL_FILE_SUFFIXES, RAY_MODEL_FILE, RAY_MODEL_NAME
from lmi_server.configuration.choice.model_layers import SERVING_PROPERTIES
from lmi_server.configuration.model_file.application import is_application, member_names
from lmi_server.configuration.model_file.positions import read_document
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.explain.explanation import Explanation, explain
from lmi_server.explain.findings import Finding, finding, findings
from lmi_server.machine.inventory import Machine

LONGEST = 1048576
"""Characters of a document beyond which it is not checked while it is open."""
_MAX_MEMBERS = 20  # models of an application file that are checked
_MODEL_KEYS = ("engine_config:", "model_loading_config:", "llm_configs:", "applications:")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a configuration depends on beside its file."""

    environment: Mapping[str, str]
    machine: Machine


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known about a text. The last two are None if it cannot be read as a configuration."""

    findings: tuple[Finding, ...] = ()
    found: Inspection | None = None
    explanation: Explanation | None = None


def is_properties(path: Path) -> bool:
    return path.name == SERVING_PROPERTIES


def is_model_file(path: Path, text: str) -> bool:
    """Return whether a file in YAML is one of Ray's: a key that only these have begins a line of it."""
    return path.suffix in MODEL_FILE_SUFFIXES and any(line.startswith(_MODEL_KEYS) for line in text.splitlines())


def check_text(path: Path, text: str, around: Surroundings) -> Checked:
    """Check `text`, which need not be saved, as the content of the file at `path`."""
    if not is_properties(path) and not is_model_file(path, text):
        return Checked()
    if len(text) > LONGEST:
        return Checked(
            (Finding("warning", f"is larger than {LONGEST} characters, and is checked only by the command"),)
        )
    try:
        return _check_properties(path.parent, text, around) if is_properties(path) else _check_yaml(path, text, around)
    except OSError as error:
        return Checked((Finding("error", f"{error.filename}: cannot be read: {error.strerror}"),))
    except ConfigurationError as error:
        lines = SECRETS.mask(error.message).splitlines()
        return Checked(tuple(finding("error", line) for line in lines))


def inspect_text(path: Path, text: str, around: Surroundings) -> Inspection:
    """Inspect `text` as the serving.properties at `path`. Raises ConfigurationError if it cannot be read."""
    return inspect_model(path.parent, around.environment, machine=around.machine, text=text)


def _check_properties(directory: Path, text: str, around: Surroundings) -> Checked:
    found = inspect_model(directory, around.environment, machine=around.machine, text=text)
    explanation = explain(found)
    return Checked(tuple(findings(explanation)), found, explanation)


def _check_yaml(path: Path, text: str, around: Surroundings) -> Checked:
    document = read_document(path, text)
    names = member_names(document)[:_MAX_MEMBERS] if is_application(document) else [None]
    checks = [_check_member(path, text, name, around) for name in names]
    if not checks:
        return Checked()
    together = dict.fromkeys(found for checked in checks for found in checked.findings)
    return replace(checks[0], findings=tuple(together))


def _check_member(path: Path, text: str, name: str | None, around: Surroundings) -> Checked:
    """Check the model file in a directory of its own, as a server keeps it."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / RAY_MODEL_FILE).symlink_to(path)
        if name is not None:
            (directory / RAY_MODEL_NAME).write_text(name, encoding="utf-8")
        checked = _check_properties(directory, text, around)
    return replace(checked, findings=tuple(_find_named(checked.findings, place, str(path))))


def _find_named(found: tuple[Finding, ...], place: str, name: str) -> Iterator[Finding]:
    for each in found:
        yield replace(each, text=each.text.replace(place, name))
