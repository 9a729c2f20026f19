"""Requests go where their beginning is known, unless that worker has too much to do."""

from __future__ import annotations

from lmi_server.serving.dispatch.request_affinity import PrefixAffinity

IDLE = {"a": 0, "b": 0, "c": 0}


def body(prefix: str, question: str = "?") -> bytes:
    return (prefix * 1000 + question * 100).encode()


def test_prefixes_stay_with_their_workers_and_are_spread() -> None:
    affinity = PrefixAffinity[str]()
    chosen = []
    for turn in range(9):
        request = body("xyz"[turn % 3], str(turn))
        worker = affinity.choose(request, IDLE)
        assert worker is not None
        affinity.record(request, worker)
        chosen.append(worker)
    assert sorted(chosen[:3]) == ["a", "b", "c"]
    assert chosen[3:6] == chosen[6:] == chosen[:3]


def test_a_short_common_beginning_does_not_count() -> None:
    affinity = PrefixAffinity[str]()
    system = "s" * 600
    affinity.record((system + "1" * 4000).encode(), "b")
    assert affinity.choose((system + "2" * 4000).encode(), {"a": 0, "b": 1}) == "a"


def test_a_worker_with_too_much_to_do_is_passed_over() -> None:
    affinity = PrefixAffinity[str]()
    affinity.record(body("x"), "b")
    assert affinity.choose(body("x"), {"a": 0, "b": 7}) == "b"
    assert affinity.choose(body("x"), {"a": 0, "b": 8}) == "a"
    assert affinity.choose(body("x"), {"a": 3}) == "a"  # b has no room at all
    assert affinity.choose(body("x"), {}) is None


def test_a_worker_that_is_gone_is_forgotten() -> None:
    affinity = PrefixAffinity[str]()
    affinity.record(body("x"), "a")
    affinity.forget("a")
    affinity.forget("never there")
    assert affinity.choose(body("x"), {"b": 1}) == "b"
    affinity.record(body("x"), "c")
    assert affinity.choose(body("x"), {"b": 0, "c": 3}) == "c"


def test_more_workers_have_more_prefixes_remembered() -> None:
    affinity = PrefixAffinity[int]()
    bodies = [number.to_bytes(4, "big") * (64 * 64) for number in range(3_300)]  # 64 blocks each
    for number, text in enumerate(bodies):
        affinity.record(text, number % 212)
    assert affinity.choose(bodies[0], dict.fromkeys((211, 0), 0)) == 0
    assert affinity.choose(bodies[150], dict.fromkeys((211, 150), 0)) == 150


def test_short_bodies_go_to_the_least_loaded_worker() -> None:
    affinity = PrefixAffinity[str]()
    affinity.record(b"short", "b")
    assert affinity.choose(b"short", {"a": 2, "b": 3, "c": 1}) == "c"
