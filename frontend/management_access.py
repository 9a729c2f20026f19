"""Who may manage models, and which files a registration may name.

Whoever registers a model runs its code. So the management API must answer neither other machines unasked, nor a web
page that the user of this machine happens to have open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.routing import Route

from frontend.api_keys import KeyRing, key_ring
from frontend.clients import Receive, Scope, Send, is_local
from frontend.web_pages import ANY, WebPages, pages_of_management, pages_of_requests
from lmi_server.artifacts.location import path_of_file_url
from lmi_server.configuration.server_settings import ServerSettings, server_home
from lmi_server.contract.errors import PermissionDeniedError
from lmi_server.machine.environment import is_multi_model
from lmi_server.serving.model_store import ModelSource

_Application = Callable[[Any, Any, Any], Awaitable[None]]

# Keys of a registration that make the server run or load what they name, whatever the name looks like.
_PATH_KEYS = ("option.model_id", "option.entryPoint", "option.pythonExecutable", "option.speculative_draft_model")
# Keys that set variables of a worker, or name classes and files that an engine imports.
_CODE_KEY = re.compile(r"option\.(env|logits_processors|\w+_(cls|plugin))")


_MANAGERS = {
    "any": "all clients (management_clients=any)",
    "local": "clients on this machine",
    "none": "no client, because api_keys is set; set management_api_keys, or management_clients=local",
}


class ManagementGuard:
    """Refuses calls of the management API.

    SageMaker's multi-model endpoints call it from another machine in a network of their own, so nothing is refused
    there.
    """

    def __init__(self, settings: ServerSettings, environment: Mapping[str, str]) -> None:
        self.keys = key_ring("management_api_keys", settings.management_api_keys, settings.management_api_keys_file)
        self._off = is_multi_model(environment)
        self._clients = settings.management_clients or _clients_by_default(settings)
        self._is_by_default = settings.management_clients is None
        self._pages = pages_of_management(settings)

    @property
    def managers(self) -> str:
        """Return in words who may manage models, for the log."""
        if self.keys is not None:
            return "clients with a key of management_api_keys"
        if self._off:
            return "all clients (SAGEMAKER_MULTI_MODEL=true)"
        return _MANAGERS[self._clients]

    @property
    def guesses_clients(self) -> bool:
        """Return whether it is by default, and by the look of its connection alone, that a client is taken as local."""
        return self.keys is None and not self._off and self._is_by_default and self._clients == "local"

    def check_reader(self, scope: Scope) -> None:
        """Raise AuthenticationError if this client may not read metrics: without keys everybody may."""
        if self.keys is not None:
            self.keys.check(scope)

    def check(self, scope: Scope) -> None:
        """Raise AuthenticationError or PermissionDeniedError if this client may not manage models.

        A key is enough, wherever the client is: no web page can make a browser send it.
        """
        if self.keys is not None:
            self.keys.check(scope)
            return
        if self._off:
            return
        self._check_client(scope)
        self._pages.check_scope(scope)

    def check_page(self, scope: Scope) -> None:
        """Raise PermissionDeniedError if this client may not load the console's page.

        The page holds nothing secret: if there are keys, it asks for one, and every call that it makes is checked.
        """
        if self.keys is None and not self._off:
            self._check_client(scope)

    def _check_client(self, scope: Scope) -> None:
        if self._clients == "none":
            raise PermissionDeniedError(
                "api_keys is set, and no client may manage models: management_api_keys lets clients with a key do it, "
                "and management_clients=local lets those on the machine of the server"
            )
        if self._clients == "local" and not is_local(scope):
            raise PermissionDeniedError(
                "Models are managed from the machine of the server alone; management_api_keys lets clients with a key "
                "do it, and management_clients=any lets all"
            )


def _clients_by_default(settings: ServerSettings) -> str:
    """Return which clients may manage models if no setting says so.

    A server with keys for requests often stands behind a proxy on its machine, through which every client looks local.
    """
    return "local" if settings.api_keys is None and settings.api_keys_file is None else "none"


class RegistrationLimits:
    """Which models, adapters and entry points a registration may name.

    A client on this machine may name everything, as with LMI, unless `registration_sources` is set. Others may name
    what that lists, by default what is in the model store. `*` in it is everything.
    """

    def __init__(self, settings: ServerSettings, environment: Mapping[str, str]) -> None:
        self._given = settings.registration_sources is not None
        self._unlimited = is_multi_model(environment) or ANY in (settings.registration_sources or ())
        home = server_home(environment, Path.cwd())
        store = () if settings.model_store is None else (settings.model_store,)
        allowed = store if settings.registration_sources is None else settings.registration_sources
        self._directories = [os.path.realpath(home / entry) for entry in allowed if not _is_remote(entry)]
        self._places = [entry.rstrip("/") for entry in allowed if _is_remote(entry)]

    def check_model(self, source: ModelSource, scope: Scope) -> None:
        """Raise PermissionDeniedError if the registration names something that this client may not use."""
        if self._apply_to(scope):
            self._check(source)

    def check_requested(self, source: ModelSource) -> None:
        """Raise PermissionDeniedError if an inference request may not register this model.

        `model_url_pattern` says which it may; `registration_sources` narrows that, as for all registrations.
        """
        if self._given and not self._unlimited:
            self._check(source)

    def _check(self, source: ModelSource) -> None:
        for name, value in _named(source):
            if not self._allows(value):
                raise self._refusal(name, value)
        for key, value in source.settings.items():
            if _CODE_KEY.fullmatch(key) is not None:
                raise self._refusal(key, value)

    def check_adapter(self, src: str, model_dir: str, scope: Scope) -> None:
        """Raise PermissionDeniedError if this client may not register an adapter of `src`."""
        beside = os.path.realpath(os.path.join(model_dir, src))
        if self._apply_to(scope) and not _is_below(beside, os.path.realpath(model_dir)) and not self._allows(src):
            raise self._refusal("src", src)

    def _apply_to(self, scope: Scope) -> bool:
        return not self._unlimited and (self._given or not is_local(scope))

    def _allows(self, text: str) -> bool:
        if _is_remote(text) and not os.path.exists(text):
            if leads_up(text):
                return False
            # Whole parts of a name: s3://models allows no s3://models-of-others.
            return any(text == place or text.startswith((f"{place}/", f"{place}:")) for place in self._places)
        path = path_of_file_url(text) if text.startswith("file:") else text
        return any(_is_below(os.path.realpath(path), directory) for directory in self._directories)

    def _refusal(self, name: str, value: str) -> PermissionDeniedError:
        return PermissionDeniedError(
            f'Parameter {name} is "{value[:200]}", which a registration may not name; '
            "use a model of the model store, or allow it by registration_sources"
        )


@dataclass(frozen=True, slots=True)
class Access:
    """What limits requests and the management API.

    `keys` is None if requests need none. `pages` is None if they need one, which no page can make a browser send, and
    if others than this machine reach the server.
    """

    keys: KeyRing | None
    pages: WebPages | None
    guard: ManagementGuard
    limits: RegistrationLimits

    @property
    def key_rings(self) -> list[KeyRing]:
        return [ring for ring in (self.keys, self.guard.keys) if ring is not None]

    @classmethod
    def of(cls, settings: ServerSettings, environment: Mapping[str, str]) -> Access:
        """Return what the settings ask for. Raises ConfigurationError if keys cannot be read."""
        keys = key_ring("api_keys", settings.api_keys, settings.api_keys_file)
        pages = pages_of_requests(settings) if keys is None else None
        return cls(keys, pages, ManagementGuard(settings, environment), RegistrationLimits(settings, environment))


def leads_up(url: str) -> bool:
    """Return whether a part of the URL or path is "..", so that it may name something else than its beginning says."""
    return ".." in unquote(url).split("/")


def protected(routes: list[Route], check: Callable[[Scope], object]) -> list[Route]:
    """Return the routes, which refuse from now on what `check` refuses."""
    for route in routes:
        route.app = _checked(route.app, check)
    return routes


def _checked(application: _Application, check: Callable[[Scope], object]) -> _Application:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        check(scope)
        await application(scope, receive, send)

    return call


def _named(source: ModelSource) -> Iterator[tuple[str, str]]:
    """Yield what a registration names: its URL, and each text of an option that may be a path or the id of a model."""
    yield "url", source.url
    for key, value in source.settings.items():
        # What lies in the directory of the model is as allowed as the model; so is a handler of this server.
        if not value or (key == "option.entryPoint" and _stays_inside(value)):
            continue
        yield from ((key, text) for text in _texts(value) if key in _PATH_KEYS or _may_be_path(text))


def _texts(value: str) -> Iterator[str]:
    """Yield the texts in a value, which may be JSON."""
    try:
        yield from _texts_in(msgspec.json.decode(value))
    except (msgspec.DecodeError, RecursionError):
        yield value


def _texts_in(decoded: Any) -> Iterator[str]:
    if isinstance(decoded, dict):
        decoded = [*decoded, *decoded.values()]
    if isinstance(decoded, list):
        for inner in decoded:
            yield from _texts_in(inner)
    else:
        yield str(decoded)


def _may_be_path(text: str) -> bool:
    return "/" in text or "\\" in text or text.startswith(("~", ".."))


def _stays_inside(entry_point: str) -> bool:
    return not os.path.isabs(entry_point) and ".." not in Path(entry_point).parts and ":" not in entry_point


def _is_remote(text: str) -> bool:
    """Return whether a text is no path: s3://bucket/prefix, the id of a model on the Hub, or the owner of one (me/)."""
    if "://" in text:
        return not text.startswith("file:")
    owner, slash, rest = text.partition("/")
    return bool(owner) and not owner.startswith((".", "~")) and bool(slash) and "/" not in rest


def _is_below(path: str, directory: str) -> bool:
    return Path(path).is_relative_to(directory)
