"""The environment that a model asks for with option.engine_version and option.engine_requirements.

It has what a worker imports (WORKER_PACKAGES), then the engine: with a version, what the extra of this project installs
for the handler, its main package in that version; with a file, the packages of the file. Nothing of the server's own
packages is in it.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from lmi_server.artifacts.environments.recipe import Recipe, normalize_name, requirement_lines
from lmi_server.artifacts.environments.uv import NO_UV, find_uv
from lmi_server.artifacts.interpreter import WORKER_PACKAGES
from lmi_server.configuration.engine import EngineDescription
from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import Machine

VERSION_KEY = "option.engine_version"
REQUIREMENTS_KEY = "option.engine_requirements"
_WHEELHOUSE = "wheelhouse"
_EXTRA = re.compile(
    r"""(?P<requirement>[^;]+?)\s*(?P<marker>;.+\S)??\s*(?:;|\band)\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']"""
)
_NAME = re.compile(r"[\w.-]+")
# The bounds in the extras of this project, and the release in a version without what follows it (rc1, +cpu).
_BOUND = re.compile(r"(>=|<)\s*([\d.]*\d)")
_RELEASE = re.compile(r"[\d.]*\d")


def engine_recipe(engine: EngineDescription[ModelOptions], model_dir: Path, machine: Machine) -> Recipe | None:
    """Return the environment that the options of a model ask for; None if its engine is the server's.

    Raises ConfigurationError if the file cannot be used, or the handler has no engine that has versions.
    """
    options = engine.options
    if not options.has_own_engine:
        return None
    requirements, asked = list(WORKER_PACKAGES.values()), []
    if options.engine_version is not None:
        asked.append(f"{VERSION_KEY} = {options.engine_version}")
        requirements += _with_version(engine, options.engine_version, machine)
    if options.engine_requirements is not None:
        asked.append(f"{REQUIREMENTS_KEY} = {excerpt(options.engine_requirements)}")
        requirements += requirement_lines(model_dir, options.engine_requirements, REQUIREMENTS_KEY)
    return Recipe(
        requirements=tuple(dict.fromkeys(requirements)),
        asked_by=", ".join(asked),
        overrides=engine.overrides(machine) if options.engine_version is not None else (),
        wheelhouse=_wheelhouse_of(model_dir, asked),
    )


def _wheelhouse_of(model_dir: Path, asked: list[str]) -> Path | None:
    """Return the folder of wheels beside the model; None if there is none, so that an index is asked."""
    wheelhouse = model_dir / _WHEELHOUSE
    if wheelhouse.is_dir():
        return wheelhouse
    if os.path.lexists(wheelhouse):  # a link to what is not mounted: no index must be asked in its place
        raise ConfigurationError(
            f"{', '.join(asked)}: {wheelhouse} is no folder; put the wheels into a folder of that name, or remove it "
            "to take packages from the index"
        )
    return None


def untested_version(engine: EngineDescription[ModelOptions], machine: Machine) -> str | None:
    """Return a warning, without the key, if option.engine_version is none that the handler was tested with."""
    version, package = engine.options.engine_version, engine.distribution(machine)
    if version is None or not package:
        return None
    try:
        lines = [line for extra in engine.extras(machine) for line in requirements_of(extra) if _is(line, package)]
    except ConfigurationError:  # engine_recipe says it
        return None
    tested = lines[0] if lines else package
    release = _release(version)
    bounds = [(sign, _release(bound)) for sign, bound in _BOUND.findall(tested)]
    if all(release >= bound if sign == ">=" else release < bound for sign, bound in bounds):
        return None
    return (
        f"is not a version that {engine.spec.title} is tested with ({tested}); "
        "it may lack what the handler uses, which the model's log then names"
    )


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without zeros at the end, so that 0.31 and 0.31.0 are the same."""
    found = _RELEASE.match(version.rpartition("!")[2])
    numbers = [int(number or 0) for number in found[0].split(".")] if found is not None else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def missing_uv() -> list[str]:
    """Return a line if uv is not installed, which makes environments; nothing if it is."""
    return [] if find_uv(process_environment()) else [NO_UV]


def _with_version(engine: EngineDescription[ModelOptions], version: str, machine: Machine) -> list[str]:
    """Return what the extras of the engine install, with its main package in one version."""
    package = engine.distribution(machine)
    if not package:
        raise ConfigurationError(
            f"{VERSION_KEY} = {version}: {engine.spec.title} has no engine with versions of its own; name packages in "
            f"the file of {REQUIREMENTS_KEY}"
        )
    others = [line for extra in engine.extras(machine) for line in requirements_of(extra) if not _is(line, package)]
    return [f"{package}=={version}", *others]


def requirements_of(extra: str) -> list[str]:
    """Return the requirements of an extra of this project, as it is installed. Raises ConfigurationError without it."""
    try:
        found = [_EXTRA.fullmatch(line) for line in requires("lmi-server") or ()]
    except PackageNotFoundError:
        raise ConfigurationError(
            f"{VERSION_KEY} needs the list of packages that comes with lmi-server; install it with pip"
        ) from None
    return [
        match["requirement"] + (match["marker"] or "")
        for match in found
        if match is not None and match["extra"] == extra
    ]


def _is(requirement: str, package: str) -> bool:
    name = _NAME.match(requirement)
    return name is not None and normalize_name(name[0]) == normalize_name(package)
