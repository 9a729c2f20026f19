"""Which models, files and code a registration may name.

A registration runs named code, and a client on another machine may name only files laid ready by the operator. What
an option names follows from its declaration (`lmi_server/configuration/references.py`). A key without a declaration
goes to an engine or to the model's code as it is, so that it may only have a number, true or false.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from frontend.access.web_pages import ANY
from frontend.http.clients import Scope, is_local
from lmi_server.artifacts.fetch import only_archive
from lmi_server.artifacts.location import (
    HubModel,
    LocalModelFile,
    S3Location,
    has_scheme,
    is_hub_id,
    local_path,
    parse_location,
    resolved_path,
)
from lmi_server.configuration.checks.registered_keys import references
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.references import FOR_OPERATOR, Kind, Reference
from lmi_server.configuration.server_settings import ServerSettings, server_home
from lmi_server.contract.errors import PermissionDeniedError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.machine.environment import is_multi_model
from lmi_server.serving.adapters.adapters import adapter_base
from lmi_server.serving.models.model_store import ModelSource

_PLAIN = re.compile(r"[+-]?\d{1,20}(\.\d{1,20})?|true|false", re.IGNORECASE | re.ASCII)
_KEY = re.compile(r"[\w.-]{1,100}", re.ASCII)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
# Everybody may propose a change to a model on the Hub, which is a revision of it: refs/pr/1, or the id of its commit.
_OF_ANYBODY = re.compile(r"refs/.*|[0-9a-f]{7,64}", re.IGNORECASE | re.DOTALL)
_OWN_MODULES = "djl_python."
# What a refusal proposes.
_FROM_STORE = "name a directory or file of the model store by its full path, or have registration_sources list it"
_FROM_OPERATOR = "set the key in the serving.properties of the model, or allow everything by registration_sources=*"
_OWN_CODE = f"name a handler of this server or a file of the model, or {_FROM_OPERATOR}"
_LONGEST_PATH = 4096  # PATH_MAX of Linux; the time to follow links grows with the square of the length


class RegistrationLimits:
    """Which models, adapters and options a registration may name.

    A client on this machine may name everything, as with LMI, unless `registration_sources` is set. Others may name its
    entries, by default the contents of the model store. `*` in it is everything. Each check returns what is to be used:
    paths without links, so that nothing else lies behind them later.
    """

    def __init__(self, settings: ServerSettings, environment: Mapping[str, str]) -> None:
        self._given = settings.registration_sources is not None
        self._unlimited = is_multi_model(environment) or ANY in (settings.registration_sources or ())
        home = server_home(environment, Path.cwd())
        places = [entry for entry in settings.registration_sources or () if _is_remote(entry, home)]
        directories = [entry for entry in settings.registration_sources or () if entry not in places]
        if settings.model_store is not None and not self._given:
            directories = [settings.model_store]
        paths = (local_path(entry, home) for entry in directories)
        self._allowed = _Allowed(
            tuple(os.path.realpath(path) for path in paths if path is not None),
            tuple(entry.rstrip("/") for entry in places),
        )

    def check_model(self, source: ModelSource, scope: Scope) -> ModelSource:
        """Return the model to register. Raises PermissionDeniedError if it names what this client may not use."""
        return self._check_source(source) if self._apply_to(scope) else source

    def check_requested(self, source: ModelSource) -> ModelSource:
        """Return the model that an inference request registers. Raises PermissionDeniedError.

        `model_url_pattern` says which it may; `registration_sources` narrows that, as for all registrations.
        """
        return self._check_source(source) if self._given and not self._unlimited else source

    def check_adapter(self, src: str, model_dir: str, scope: Scope) -> str:
        """Return the source of an adapter to register. Raises PermissionDeniedError if this client may not use it."""
        if not self._apply_to(scope):
            return src
        return self._allowed.and_in(model_dir).model("src", src, adapter_base(src, model_dir))

    def _apply_to(self, scope: Scope) -> bool:
        return not self._unlimited and (self._given or not is_local(scope))

    def _check_source(self, source: ModelSource) -> ModelSource:
        url = self._allowed.model("url", source.url, Path.cwd())
        options = (
            _Options(self._allowed.and_in(url), Path(url)) if _is_model_directory(url) else _Options(self._allowed)
        )
        settings = {key: options.check(key, value) for key, value in source.settings.items()}
        return replace(source, url=url, settings=settings)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What may be named: what is in `directories`, without links, and `places` on S3 and on the Hub."""

    directories: tuple[str, ...]
    places: tuple[str, ...]

    def and_in(self, directory: str) -> _Allowed:
        """Return the same with the contents of `directory`, the model's."""
        return replace(self, directories=(*self.directories, os.path.realpath(directory)))

    def model(self, name: str, text: str, base: Path) -> str:
        """Return a model or an adapter as it is to be fetched; the code that fetches it knows its kind."""
        try:
            location = parse_location(text, base)
        except ValueError:  # nothing is there, or there is no such scheme: the fetch says so, to clients that may ask
            location = None
        if isinstance(location, S3Location):
            return self._place(name, text)
        if isinstance(location, LocalModelFile) and location.member is not None:
            raise refusal(name, text)  # its links would not be followed: FILE#MODEL is no path
        if isinstance(location, HubModel):
            if os.path.exists(text):  # an engine would take it for this path
                raise refusal(name, text)
            return self._place(name, text)
        return self.path(name, text, base)

    def path(self, name: str, text: str, base: Path) -> str:
        """Return the path that `text` means."""
        path = local_path(text, base)
        if path is None or not self.has(path):
            raise refusal(name, text)
        return resolved_path(path)

    def has(self, path: str) -> bool:
        """Return whether a path lies in one of the directories, once its links are followed."""
        if len(path) > _LONGEST_PATH:
            return False
        try:
            real = Path(os.path.realpath(path))
        except ValueError:  # it has a NUL character, or half of a surrogate pair
            return False
        return any(real.is_relative_to(directory) for directory in self.directories)

    def _place(self, name: str, text: str) -> str:
        # Whole parts of a name: s3://models allows no s3://models-of-others.
        found = any(text == place or text.startswith((f"{place}/", f"{place}:")) for place in self.places)
        if leads_up(text) or not found:
            raise refusal(name, text)
        return text


@dataclass(frozen=True, slots=True)
class _Options:
    """Checks the options of a model; `directory` is its own, None if it is still to be fetched."""

    allowed: _Allowed
    directory: Path | None = None

    def check(self, key: str, value: str) -> str:
        """Return the value to use. Raises PermissionDeniedError."""
        value = value.strip()  # as it is read later
        reference = references().get(key)
        if not value or (reference is None and _PLAIN.fullmatch(value)):
            return value
        reference = reference or FOR_OPERATOR
        if value in reference.words:
            return value
        if reference.within is None:
            return self.text(key, value, reference.kind)
        return self._json(_Members(self, key, reference, reference.within), value)

    def text(self, key: str, text: str, kind: Kind) -> str:
        """Return a text of this kind to use. Raises PermissionDeniedError."""
        if kind is Kind.NOTHING or (kind is Kind.TEMPLATE and "{" in text):
            return text
        if kind is Kind.REVISION and _OF_ANYBODY.fullmatch(text) is None:
            return text
        if kind is Kind.MODEL:
            return self.allowed.model(key, text, self.directory or Path.cwd())
        if kind in (Kind.PATH, Kind.TEMPLATE):
            return self._path(key, text)
        if kind is Kind.CODE and self._is_own_code(text):
            return resolved_path(text) if os.path.isabs(text) else text
        raise refusal(key, text, _OWN_CODE if kind is Kind.CODE else _FROM_OPERATOR)

    def _path(self, key: str, text: str) -> str:
        if self.directory is None and _stays_inside(text):
            return text  # an archive, or a place on S3, holds no links that lead out of it
        return self.allowed.path(key, text, self.directory or Path.cwd())

    def _is_own_code(self, entry_point: str) -> bool:
        """Return whether an entry point is a handler of this server, or a file that may be used."""
        if HANDLERS.by_entry_point(entry_point) is not None:
            return True
        if has_scheme(entry_point):
            return False
        if not entry_point.endswith(".py"):
            return _MODULE.fullmatch(entry_point) is not None and self._has_module(entry_point)
        if self.directory is None:
            return _stays_inside(entry_point) or self.allowed.has(entry_point)
        return self.allowed.has(os.path.join(self.directory, entry_point))

    def _has_module(self, module: str) -> bool:
        """Return whether a module is in the model's directory; one that is installed beside the server is not its own.

        Those of djl_python are this server's.
        """
        if module.startswith(_OWN_MODULES):
            return True
        name = module.partition(".")[0]
        beside = () if self.directory is None else (self.directory / name, self.directory / f"{name}.py")
        return any(os.path.exists(path) and self.allowed.has(str(path)) for path in beside)

    def _json(self, members: _Members, value: str) -> str:
        """Return a value in JSON, written anew: of several members with one name, the last one counts."""
        try:
            return msgspec.json.encode(members.check(msgspec.json.decode(value))).decode()
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise refusal(members.key, value, _FROM_OPERATOR) from None


@dataclass(frozen=True, slots=True)
class _Members:
    """Checks the members of an option in JSON at any depth."""

    options: _Options
    key: str
    reference: Reference
    within: Mapping[str, Kind]

    def check(self, member: Any, name: str = "") -> Any:
        """Return the value of `name`, with its references resolved. Raises PermissionDeniedError."""
        if isinstance(member, dict):
            return {self._name(inner): self.check(value, inner) for inner, value in member.items()}
        if isinstance(member, list):
            return [self.check(each, name) for each in member]
        if not isinstance(member, str) or (name in self.within and member in self.reference.words):
            return member
        return self.options.text(f"{self.key}: {name}", member, self.within.get(name, self.reference.kind))

    def _name(self, name: str) -> str:
        if _KEY.fullmatch(name) is None:
            raise refusal(self.key, name, _FROM_OPERATOR)
        return name


def _is_model_directory(url: str) -> bool:
    """Return whether a URL is the path of a directory with a model, and not with the archive of one."""
    try:
        return os.path.isdir(url) and only_archive(Path(url)) is None
    except OSError:
        return False


def leads_up(url: str) -> bool:
    """Return whether a part of the URL or path is "..", so that it may name something else than its beginning says."""
    return ".." in unquote(url).split("/")


def refusal(name: str, value: str, remedy: str = _FROM_STORE) -> PermissionDeniedError:
    return PermissionDeniedError(
        f'Parameter {excerpt(name)} is "{excerpt(value)}", which a registration may not name; {remedy}'
    )


def _stays_inside(text: str) -> bool:
    return not (has_scheme(text) or os.path.isabs(text) or text.startswith("~") or leads_up(text) or ":" in text)


def _is_remote(entry: str, home: Path) -> bool:
    """Return whether an entry of registration_sources is no directory: s3://bucket/prefix, owner/name or owner/."""
    if has_scheme(entry):
        return not entry.startswith("file:")
    if entry.endswith("/"):
        return is_hub_id(f"{entry}name")
    return is_hub_id(entry) and not os.path.exists(home / entry)
