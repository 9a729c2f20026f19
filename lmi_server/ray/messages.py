"""What a Ray actor and the process beside it tell each other: one message of JSON per line.

The actor of a replica writes one Start to its process, which answers with one ReplicaReady or ReplicaFailed, then with
Ongoing. The actor of an ingress writes ClusterModels whenever a replica comes or goes; its process writes one
Listening, then ReplicaNeeded.
The end of the actor's pipe means that it is dead. Requests and answers never come this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_server.contract.texts.sendable import json_bytes
from lmi_server.supervisor.launch.remote import RemotePlace


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Load the model at `url` and take connections on `host`. `settings` is the layer of the registration call.

    After the end of the replica is asked for (`Drain`), the requests that it holds get `drain_timeout_s` seconds.
    """

    url: str
    name: str
    host: str
    settings: Mapping[str, str] = {}
    drain_timeout_s: float


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The front end's knowledge of a model that it does not load: its configuration, as `dump` of options writes it.

    `handler` finds the HandlerSpec. `adapters` are directories by name.
    """

    url: str
    model_dir: str
    handler: str
    options: dict[str, Any]
    passed_through: dict[str, str]
    serving: dict[str, Any]
    adapters: dict[str, str] = {}


class ReplicaReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model `name` is loaded, and front ends may connect to `place`."""

    name: str
    place: RemotePlace
    model: ModelDescription


class ReplicaFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded, or not any more; the process ends."""

    reason: str


class Ongoing(msgspec.Struct, frozen=True, tag=True):
    """The number of requests that the replica holds."""

    requests: int


FromReplica = ReplicaReady | ReplicaFailed | Ongoing


class Drain(msgspec.Struct, frozen=True):
    """Take no more requests, finish what is there, and end."""


class ModelReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """Every replica of one model, by its id; `model` is None until the first of them is loaded."""

    name: str
    aliases: tuple[str, ...] = ()
    min_replicas: int
    max_replicas: int
    model: ModelDescription | None = None
    places: Mapping[str, RemotePlace] = {}


class ClusterModels(msgspec.Struct, frozen=True):
    """Every model of the application."""

    models: list[ModelReplicas]


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The front end has its port."""


class ReplicaNeeded(msgspec.Struct, frozen=True, tag=True):
    """A request for the model `name` waits, and there is no replica."""

    name: str


FromFrontEnd = Listening | ReplicaNeeded


def line(message: msgspec.Struct) -> bytes:
    """Return the line of `message`."""
    return json_bytes(message) + b"\n"
