"""`lmi-server ray deploy` ends if the front end does not answer: a cluster without a token, joined with one."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install lmi-server[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


class FakeHandle:
    """A handle of Ray Serve, and its answer, which never comes."""

    def remote(self) -> FakeHandle:
        return self

    def result(self, timeout_s: float) -> object:
        raise TimeoutError(timeout_s)


def test_a_front_end_that_does_not_answer_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmi_server.ray import cluster

    monkeypatch.setattr(cluster.serve, "get_deployment_handle", lambda name, app: FakeHandle())
    with pytest.raises(TimeoutError, match=r"in 60 s where it listens; .* set RAY_AUTH_MODE=disabled"):
        cluster._front_end()
