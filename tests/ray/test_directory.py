"""What front ends are told of models and replicas, in whatever order Ray says it; and the process beside an actor."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_server.ray.actors.child import Child
from lmi_server.ray.actors.directory import Directory
from lmi_server.ray.messages import ModelDescription, ModelReplicas, ReplicaNeeded, ReplicaReady
from lmi_server.supervisor.launch.remote import RemotePlace


def model(url: str) -> ModelDescription:
    return ModelDescription(url=url, model_dir="", handler="echo", options={}, passed_through={}, serving={})


def announced(name: str, version: str, *ports: int) -> dict[str, str]:
    """Return what replicas of a version of a model announce, by the id of each."""
    replicas = {
        str(port): ReplicaReady(
            name=name, place=RemotePlace(host="h", port=port, token="t", ahead=0), model=model(version)
        )
        for port in ports
    }
    return {replica: msgspec.json.encode(serving).decode() for replica, serving in replicas.items()}


def entry(deployment: str, name: str, **more: Any) -> Mapping[str, Any]:
    return {"deployment": deployment, "name": name, "aliases": [], "min_replicas": 1, "max_replicas": 3, **more}


def told(directory: Directory) -> dict[str, ModelReplicas]:
    return {replicas.name: replicas for replicas in directory.models().models}


def ports(replicas: ModelReplicas) -> set[str]:
    return set(replicas.places)


def test_replicas_come_and_go() -> None:
    directory = Directory()
    directory.configure([entry("d", "a", aliases=["b"])])
    assert directory.deployment_of("a") == "d"
    assert directory.deployment_of("b") is None
    assert directory.announce("d", announced("a", "1", 1, 2))
    assert not directory.announce("d", announced("a", "1", 1, 2))
    assert (ports(told(directory)["a"]), told(directory)["a"].aliases) == ({"1", "2"}, ("b",))
    assert directory.announce("d", {})
    assert ports(told(directory)["a"]) == set()
    assert told(directory)["a"].model == model("1")  # requests wait for the next replica
    assert not directory.announce("other", announced("a", "1", 3))


def test_replicas_of_a_new_name_are_known_although_they_ran_before_the_name_was() -> None:
    directory = Directory()
    directory.configure([entry("d", "old")])
    directory.announce("d", announced("old", "1", 1))
    directory.announce("d", announced("old", "1", 1) | announced("new", "1", 2))
    assert ports(told(directory)["old"]) == {"1"}
    directory.configure([entry("d", "new")])
    assert {name: ports(replicas) for name, replicas in told(directory).items()} == {"new": {"2"}}
    assert told(directory)["new"].model == model("1")


def test_a_model_keeps_its_replicas_when_others_change() -> None:
    directory = Directory()
    directory.configure([entry("d", "a"), entry("e", "b")])
    directory.announce("d", announced("a", "1", 1))
    directory.configure([entry("d", "a", max_replicas=5)])
    assert set(told(directory)) == {"a"}
    assert (ports(told(directory)["a"]), told(directory)["a"].max_replicas) == ({"1"}, 5)
    directory.configure([entry("d", "a"), entry("e", "b")])
    assert ports(told(directory)["b"]) == set()


def test_new_replicas_say_how_a_model_is_configured_and_old_ones_go_on() -> None:
    directory = Directory()
    directory.configure([entry("d", "a")])
    directory.announce("d", announced("a", "1", 1))
    directory.announce("d", announced("a", "1", 1) | announced("a", "2", 2))
    assert told(directory)["a"].model == model("2")
    directory.announce("d", announced("a", "2", 2))
    assert told(directory)["a"].model == model("2")


def test_a_model_without_replicas_is_described_by_one_that_has_ended() -> None:
    directory = Directory()
    directory.configure([entry("d", "a", min_replicas=0)])
    [text] = announced("a", "1", 1).values()
    [other] = announced("other", "1", 1).values()
    assert not directory.describe("d", other)
    assert not directory.describe("gone", text)
    assert directory.describe("d", text)
    assert (told(directory)["a"].model, ports(told(directory)["a"])) == (model("1"), set())


def test_the_end_of_a_process_is_heard_although_it_has_printed_what_is_no_message() -> None:
    ended = threading.Event()
    child = Child(["this"], {}, lambda text: msgspec.json.decode(text, type=ReplicaNeeded), lambda code: ended.set())
    assert ended.wait(60)
    child.end(60)


def test_a_message_to_a_process_that_is_being_ended_is_dropped() -> None:
    """Ray calls `reconfigure` in a thread, also while it deletes the actor."""
    child = Child(["this"], {}, lambda text: None, lambda code: None)
    child.end(60)
    child.tell(ReplicaNeeded("a"))
