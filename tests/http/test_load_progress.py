"""How far a model is that loads: over the management API, as its worker says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_helpers import Server, make_model, running
from waiting import wait_until


def described(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get(f"/models/{name}").json()[0]["models"][0]
    return found


def test_a_worker_says_how_far_it_is_until_it_is_loaded(tmp_path: Path) -> None:
    with running() as server:
        url = make_model(tmp_path / "slow", "fault_handlers:ReportingHandler")
        assert server.http.post("/models", params={"url": str(url), "synchronous": "false"}).status_code == 202
        wait_until(
            lambda: described(server, "slow").get("loading", {}).get("done") == 3, "the worker says how far it is"
        )
        loading = described(server, "slow")["loading"]
        assert loading["what"].startswith("<img src=x onerror=alert(1)>\\n")
        assert len(loading["what"]) < 300
        assert (loading["total"], loading["percent"], loading["unit"]) == (4, 75, "parts")
        assert loading["startTime"].endswith("Z")
        assert "secondsLeft" not in loading  # nothing moves
        assert server.log_line(r"\[slow\] <img src=x onerror=alert\(1\)>\\n.*: 3 of 4 parts \(75 %\)")
        (url / "go").touch()
        wait_until(lambda: described(server, "slow")["status"] == "Healthy", "it is loaded")
        assert "loading" not in described(server, "slow")
