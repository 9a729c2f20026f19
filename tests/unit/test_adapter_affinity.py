"""Requests for an adapter go where it is loaded, unless that worker has too much to do."""

from __future__ import annotations

from lmi_server.serving.dispatch.request_affinity import AdapterAffinity


def test_an_adapter_stays_where_it_is_and_a_new_one_goes_where_there_is_room() -> None:
    affinity = AdapterAffinity[str](2)
    affinity.record("x", "a")
    assert affinity.narrow("x", {"a": 7, "b": 0}) == {"a": 7}
    assert affinity.narrow("y", {"a": 0, "b": 0}) == {"b": 0}
    assert affinity.narrow("x", {"a": 8, "b": 0}) == {"b": 0}
    assert affinity.narrow("x", {}) == {}


def test_a_worker_is_taken_to_keep_the_last_ones_alone() -> None:
    affinity = AdapterAffinity[str](2)
    for adapter in ("x", "y", "x", "z"):
        affinity.record(adapter, "a")
    assert affinity.narrow("y", {"a": 1, "b": 0}) == {"b": 0}
    assert affinity.narrow("x", {"a": 1, "b": 0}) == {"a": 1}
    affinity.forget("a")
    assert affinity.narrow("x", {"a": 1, "b": 0}) == {"b": 0}


def test_a_name_that_no_adapter_has_for_its_length_is_not_remembered() -> None:
    affinity = AdapterAffinity[str](2)
    affinity.record("x", "a")
    affinity.record("y" * 257, "a")
    affinity.record("z" * 257, "a")
    assert affinity.narrow("x", {"a": 1, "b": 0}) == {"a": 1}
    assert affinity.narrow("z" * 257, {"a": 0, "b": 0}) == {"b": 0}
