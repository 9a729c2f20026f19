"""The two that are compared: servers, model directories that a server of the command's own loads, or versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_server.client.server_calls import ServerCalls
from lmi_server.client.trial_server import LoadFailedError, TrialServer, trial_server
from lmi_server.contract.errors import ConfigurationError
from lmi_server.verify.asking import Side

_SCHEMES = ("http://", "https://")
OLD, NEW = "old", "new"


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says of one side. `settings` change those of a model directory."""

    title: str
    name: str
    settings: Mapping[str, str]

    @property
    def is_url(self) -> bool:
        return self.name.startswith(_SCHEMES)


@contextlib.contextmanager
def open_sides(
    old: Given,
    new: Given,
    server: str | None,
    model: str,
    headers: Mapping[str, str],
    log: Path,
    timeout_s: float | None,
) -> Iterator[tuple[Side, Side]]:
    """Return both sides, ready to answer; models are unloaded at the end. Raises ConfigurationError."""
    if server is not None:
        calls = ServerCalls(server, headers)
        yield Side(old.title, calls, model, old.name), Side(new.title, calls, model, new.name)
        return
    with contextlib.ExitStack() as stack:
        started: list[TrialServer] = []

        def own_server() -> TrialServer:
            if not started:
                started.append(stack.enter_context(trial_server(log)))
            return started[0]

        yield _side(old, model, headers, own_server, timeout_s), _side(new, model, headers, own_server, timeout_s)


def _side(
    given: Given, model: str, headers: Mapping[str, str], own_server: Callable[[], TrialServer], timeout_s: float | None
) -> Side:
    if given.is_url:
        if given.settings:
            raise ConfigurationError(f"--set changes a model directory, and {given.name} is a server; leave it out")
        return Side(given.title, ServerCalls(given.name, headers), model)
    server = own_server()
    path = Path(given.name)
    place = str(path.resolve()) if path.exists() else given.name
    try:
        server.load(place, given.settings, timeout_s, name=given.title)
    except LoadFailedError as error:
        raise ConfigurationError(f"{given.name} does not load: {error}") from error
    return Side(given.title, ServerCalls(server.url, {}), given.title)
