from __future__ import annotations

import pytest

from lmi_server.contract.errors import QuarantinedError
from lmi_server.contract.protocol import Input
from lmi_server.serving.dispatch.quarantine import Quarantine, fingerprint


def request(body: bytes, **headers: str) -> Input:
    return Input("invocations", headers, [("data", body)])


KILLER, INNOCENT, OTHER = (fingerprint(request(body)) for body in (b"killer", b"innocent", b"other"))


def is_refused(quarantine: Quarantine, body: bytes, now: float) -> bool:
    try:
        quarantine.check(request(body), now)
    except QuarantinedError:
        return True
    return False


def test_a_request_is_refused_after_the_second_death_until_it_expires() -> None:
    quarantine = Quarantine(600)
    assert not quarantine
    assert quarantine.record([KILLER, INNOCENT], 0) is None
    assert not is_refused(quarantine, b"killer", 1)
    quarantine.acquit(INNOCENT)
    assert quarantine.record([KILLER, OTHER], 10) == KILLER
    assert is_refused(quarantine, b"killer", 609)
    assert not is_refused(quarantine, b"other", 609)
    assert not is_refused(quarantine, b"killer", 611)
    assert not quarantine


def test_nobody_is_blamed_while_several_may_have_done_it() -> None:
    quarantine = Quarantine(600)
    for now in (0, 1):
        assert quarantine.record([KILLER, INNOCENT], now) is None
    assert not is_refused(quarantine, b"killer", 2)
    quarantine.acquit(INNOCENT)
    assert quarantine.record([KILLER, INNOCENT], 3) == KILLER


def test_the_same_request_twice_in_one_worker_is_one() -> None:
    quarantine = Quarantine(600)
    assert quarantine.record([KILLER, KILLER], 0) is None
    assert quarantine.record([KILLER, KILLER], 1) == KILLER


def test_memory_is_bounded_and_0_switches_it_off() -> None:
    quarantine = Quarantine(600)
    for number in range(3000):
        quarantine.record([b"%d" % number], 0)
    assert len(quarantine._suspects) == 1000
    off = Quarantine(0)
    off.record([KILLER], 0)
    assert off.record([KILLER], 1) is None
    assert not off


@pytest.mark.parametrize(
    "name", ["x-request-id", "x-request-timeout", "user-agent", "x-stainless-retry-count", "traceparent"]
)
def test_what_differs_between_attempts_does_not_count(name: str) -> None:
    assert fingerprint(request(b"a", **{name: "1"})) == fingerprint(request(b"a", **{name: "2"}))
    assert fingerprint(request(b"a", **{"x-case": "1"})) != fingerprint(request(b"a", **{"x-case": "2"}))


def test_the_id_of_a_request_hides_no_header() -> None:
    """Clients choose it: with another header's value as its id, a request would count as one without that header."""
    without, hidden, other = (
        Input("invocations", headers, [("data", b"a")], request_id=request_id)
        for headers, request_id in (({}, "1"), ({"x-case": "fatal"}, "fatal"), ({"x-case": ""}, "2"))
    )
    assert len({fingerprint(without), fingerprint(hidden), fingerprint(other)}) == 3
    named = [Input("invocations", {"x-own-id": name}, [("data", b"a")], request_id=name) for name in ("1", "2")]
    assert fingerprint(named[0]) == fingerprint(named[1])
