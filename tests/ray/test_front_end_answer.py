"""`lmi-server ray deploy` asks the front end again if Ray loses its answer, which no test can make Ray do."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install lmi-server[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


class FakeAnswer:
    """The answer of a front end: lost, or its address."""

    def __init__(self, value: dict[str, object] | None) -> None:
        self._value = value

    def result(self, timeout_s: float) -> dict[str, object]:
        if self._value is None:
            raise TimeoutError(f"no answer in {timeout_s} s")
        return self._value


class FakeHandle:
    """A handle of Ray Serve whose first answers are lost."""

    def __init__(self, lost: int) -> None:
        self._lost = lost

    def remote(self) -> FakeAnswer:
        self._lost -= 1
        return FakeAnswer(None if self._lost >= 0 else {"port": 8080})


@pytest.fixture
def cluster() -> ModuleType:
    from lmi_server.ray import cluster as module

    return module


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_lost_answer_is_asked_for_again(
    cluster: ModuleType, lost: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = FakeHandle(lost)
    monkeypatch.setattr(cluster.serve, "get_deployment_handle", lambda name, app: handle)
    assert cluster._front_end() == {"port": 8080}
    assert [record.getMessage() for record in caplog.records] == [
        f"the front end has not answered in 30 s ({asked} of 4)" for asked in range(1, lost + 1)
    ]


def test_a_front_end_that_never_answers_is_an_error(cluster: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = FakeHandle(4)
    monkeypatch.setattr(cluster.serve, "get_deployment_handle", lambda name, app: handle)
    with pytest.raises(TimeoutError, match="does not say where it listens"):
        cluster._front_end()
