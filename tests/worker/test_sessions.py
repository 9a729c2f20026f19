"""Stateful sessions: what djl_python's SessionManager keeps, and requests that open, name and close sessions."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from artifact_helpers import BUCKET, S3, s3_server
from own_code_helpers import make_own
from paths import MODEL_CODE
from server_helpers import Server, make_model, running, serving

from lmi_server import worker

COMPAT = Path(worker.__file__).parent.parent / "compat"
HEADER = "X-Amzn-SageMaker-Session-Id"


@pytest.fixture(scope="module")
def sessions() -> Iterator[Any]:
    """Import djl_python as a worker does."""
    sys.path.insert(0, str(COMPAT))
    try:
        from djl_python import session_manager

        yield session_manager
    finally:
        sys.path.remove(str(COMPAT))
        for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
            del sys.modules[name]


@pytest.fixture
def manager(sessions: Any, tmp_path: Path) -> Any:
    return sessions.SessionManager({"sessions_path": str(tmp_path), "sessions_expiration": "60"})


def test_another_manager_finds_what_one_has_stored(sessions: Any, manager: Any, tmp_path: Path) -> None:
    session = manager.create_session()
    session.put("a/b", {"text": "x", "list": [1, (2.5, None)], "bytes": b"\0", "array": np.arange(6).reshape(2, 3)})
    other = sessions.SessionManager({"sessions_path": str(tmp_path)}).get_session(session.session_id)
    value = other.get("a-b")
    assert value["list"] == [1, (2.5, None)]
    assert (value["text"], value["bytes"]) == ("x", b"\0")
    assert value["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (other.get("nothing"), other.get("nothing", 3)) == (None, 3)
    assert other.expiration_ts == session.expiration_ts


class Turn(NamedTuple):
    """A value of a class of the user's own."""

    text: str


@pytest.mark.parametrize(
    "value",
    [None, 2**70, {1, 2}, {(1, 2): [3.5]}, datetime(2026, 1, 2, tzinfo=UTC), Path("x"), Turn("a"), slice(1, 2), b"\0"],
    ids=lambda value: type(value).__name__,
)
def test_every_value_that_pickle_takes_comes_back(manager: Any, value: Any) -> None:
    session = manager.create_session()
    session.put("key", value)
    assert session.get("key") == value


def test_a_value_that_cannot_be_stored_leaves_the_one_before(manager: Any) -> None:
    session = manager.create_session()
    session.put("key", "before")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        session.put("key", lambda: None)
    assert session.get("key") == "before"


def test_keys_may_begin_with_a_dot(sessions: Any, manager: Any) -> None:
    session = manager.create_session()
    session.put(".request_id", 3)
    again = sessions.Session(session.session_id, manager.sessions_path)
    assert again.get(".request_id") == 3
    assert again.expiration_ts == session.expiration_ts == session.get(".expiration_ts")


def test_what_put_did_not_store_is_not_unpickled(manager: Any) -> None:
    session = manager.create_session()
    session.get_as_numpy("array", (2,), create=True)
    with pytest.raises(ValueError, match=r"put\(\) did not store the value of array; read an array with get_as_numpy"):
        session.get("array")


def test_a_directory_in_which_others_may_write_is_reported(
    sessions: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    sessions.SessionManager({"sessions_path": str(tmp_path)})
    assert "chmod 700" in caplog.text


def test_an_array_whose_memory_is_a_file(sessions: Any, manager: Any, tmp_path: Path) -> None:
    session = manager.create_session()
    with pytest.raises(ValueError, match="no array frames"):
        session.get_as_numpy("frames", (2, 3))
    array = session.get_as_numpy("frames", (2, 3), create=True)
    array[1] = 7
    again = sessions.SessionManager({"sessions_path": str(tmp_path)}).get_session(session.session_id)
    assert again.get_as_numpy("frames", (2, 3)).tolist() == [[0, 0, 0], [7, 7, 7]]
    with pytest.raises(ValueError, match="has 24 bytes"):
        again.get_as_numpy("frames", (2, 3), np.float64)


def test_sessions_end(sessions: Any, manager: Any, tmp_path: Path) -> None:
    short = sessions.SessionManager({"sessions_path": str(tmp_path), "sessions_expiration": 0.01}).create_session()
    time.sleep(0.02)  # the point: the time after which it ends
    assert manager.get_session(short.session_id) is None
    with pytest.raises(ValueError, match="session not found"):
        manager.get_session(short.session_id)
    closed = manager.create_session()
    manager.close_session(closed.session_id)
    with pytest.raises(ValueError, match="session not found"):
        manager.close_session(closed.session_id)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", None, "NEW_SESSION"])
def test_no_session_is_named(manager: Any, name: Any) -> None:
    assert manager.get_session(name) is None


@pytest.mark.parametrize("name", ["..", "../x", "/etc", "x" * 36, "a.b"])
def test_an_id_is_no_path(manager: Any, name: str) -> None:
    with pytest.raises(ValueError, match="session not found"):
        manager.get_session(name)
    with pytest.raises(ValueError, match="session not found"):
        manager.close_session(name)


@pytest.mark.parametrize("key", ["", "..", ".", "a\0"])
def test_a_key_is_no_path(manager: Any, key: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        manager.create_session().put(key, 1)


# --- over HTTP ---


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("home")) as server:
        yield server


def saved(s3: S3) -> set[str]:
    """Return what is below the prefix of the sessions; other tests' objects are in the same bucket."""
    found = s3.client.list_objects_v2(Bucket=BUCKET, Prefix="sessions/")
    return {entry["Key"] for entry in found.get("Contents", ())}


@pytest.mark.slow
def test_sessions_are_saved_to_s3_and_found_from_elsewhere(
    sessions: Any, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/sessions/"
    here = sessions.SessionManager({"sessions_path": tmp_path / "here", "sessions_s3url": url})
    there = sessions.SessionManager({"sessions_path": tmp_path / "there", "sessions_s3url": url})
    session = here.create_session()
    session.put("turns", [1, 2])
    session.get_as_numpy("state", (3,), create=True)[:] = 7
    past = {"sessions_path": here.sessions_path, "sessions_expiration": -1}
    expired = sessions.SessionManager(past).create_session()
    sessions.save_sessions()
    prefix = f"sessions/{session.session_id}"
    assert saved(s3) == {f"{prefix}/.expiration_ts", f"{prefix}/turns", f"{prefix}/state"}
    with pytest.raises(ValueError, match="session not found"):
        there.get_session(expired.session_id)
    found = there.get_session(session.session_id)
    assert (found.get("turns"), found.expiration_ts) == ([1, 2], session.expiration_ts)
    assert found.get_as_numpy("state", (3,)).tolist() == [7, 7, 7]
    there.close_session(session.session_id)
    assert saved(s3) == set()


@pytest.mark.parametrize("url", ["bucket/prefix", "s3://", "s3:///prefix"])
def test_a_place_that_is_not_in_s3_is_refused(sessions: Any, tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match=r'sessions_s3url = ".*" is not allowed; allowed: s3://bucket/prefix'):
        sessions.SessionManager({"sessions_path": tmp_path, "sessions_s3url": url})


@pytest.mark.slow
def test_sessions_outlive_the_machine(s3: S3, tmp_path: Path) -> None:
    """A server that has nothing but S3 in common with the one before goes on with its sessions."""
    variables = {name: value for name, value in s3.variables.items() if name.startswith("AWS_")}
    headers = {}
    for place, count in (("one", 1), ("two", 2)):
        code = (MODEL_CODE / "sessions.py").read_text()
        options = {"sessions_path": tmp_path / place / "sessions", "sessions_s3url": f"s3://{BUCKET}/own"}
        with running(make_own(tmp_path / place / "model", code, **options), variables=variables, workers=1) as server:
            if not headers:
                reply = server.http.post("/invocations", json={"requestType": "NEW_SESSION"})
                headers = {HEADER: reply.headers[HEADER]}
            assert server.http.post("/invocations", json={}, headers=headers).json()["count"] == count
            assert server.stop() == 0


@pytest.mark.slow
def test_a_model_that_generates_text_has_them_saved_too(s3: S3, tmp_path: Path) -> None:
    variables = {name: value for name, value in s3.variables.items() if name.startswith("AWS_")}
    options = {"enable_stateful_sessions": "true", "sessions_s3url": f"s3://{BUCKET}/text"}
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    with serving(tmp_path / "one", variables=variables, sessions_path=str(tmp_path / "1"), **options) as server:
        session_id = opened(server)
        assert server.stop() == 0
    with serving(tmp_path / "two", variables=variables, sessions_path=str(tmp_path / "2"), **options) as server:
        assert server.http.post("/invocations", json=body, headers={HEADER: session_id}).status_code == 200
        unknown = server.http.post("/invocations", json=body, headers={HEADER: session_id[:-4] + "0000"})
        assert (unknown.status_code, "session not found" in unknown.json()["message"]) == (424, True)


def opened(server: Server) -> str:
    reply = server.http.post("/invocations", json={"requestType": "NEW_SESSION"})
    assert reply.status_code == 200
    header = reply.headers[HEADER]
    session_id, _, expires = header.partition("; Expires=")
    assert datetime.fromisoformat(expires) > datetime.now().astimezone()
    assert reply.json() == {"result": f"Session {session_id} created"}
    return str(session_id)


def test_a_model_that_generates_text_opens_checks_and_closes_sessions(tmp_path: Path) -> None:
    options = {"enable_stateful_sessions": "true", "sessions_path": str(tmp_path / "sessions")}
    body = {"inputs": "a requestType", "parameters": {"max_new_tokens": 1}}
    with serving(tmp_path, **options) as server:
        session_id = opened(server)
        assert server.http.post("/invocations", json=body, headers={HEADER: session_id}).status_code == 200
        os.kill(server.worker_pid(), signal.SIGKILL)
        server.log_line(r"\] ready: process")
        assert server.http.post("/invocations", json=body, headers={HEADER: session_id}).status_code == 200
        closed = server.http.post("/invocations", json={"requestType": "CLOSE"}, headers={HEADER: session_id})
        assert closed.json() == {"result": f"Session {session_id} closed"}
        assert closed.headers["X-Amzn-SageMaker-Closed-Session-Id"] == session_id
        for refused in (body, {"requestType": "CLOSE"}):
            reply = server.http.post("/invocations", json=refused, headers={HEADER: session_id})
            assert (reply.status_code, reply.json()["message"]) == (424, f"session not found: {session_id}")
        text = {"Content-Type": "text/plain"}
        assert server.http.post("/invocations", content="a requestType", headers=text).status_code == 200
        other = server.http.post("/invocations", json={"requestType": "PAUSE"})
        assert other.status_code == 424
        assert "send NEW_SESSION or CLOSE" in other.json()["message"]
        assert server.http.post("/invocations", json={"requestType": "CLOSE"}).status_code == 424
        assert server.http.post("/invocations", json=body).status_code == 200


@pytest.mark.slow
def test_the_requests_of_a_session_go_to_its_worker(tmp_path: Path) -> None:
    """Each of three workers answers with its process id; a session keeps its worker until that worker ends."""
    directory = make_model(tmp_path / "model", minWorkers=3, maxWorkers=3, sessions_path=tmp_path / "sessions")
    (directory / "serving.properties").write_text(
        re.sub("option.(entryPoint|test_handler)=.*\n", "", (directory / "serving.properties").read_text())
    )
    shutil.copy(MODEL_CODE / "sessions.py", directory / "model.py")
    with running(directory, workers=3) as server:
        owners = {}
        for _ in range(6):
            reply = server.http.post("/invocations", json={"requestType": "NEW_SESSION"})
            owners[reply.headers[HEADER]] = reply.json()["pid"]
        for count in (1, 2, 3):
            for session, pid in owners.items():
                received = server.http.post("/invocations", json={}, headers={HEADER: session}).json()
                assert received == {"pid": pid, "count": count}
        session, pid = owners.popitem()
        os.kill(pid, signal.SIGKILL)
        server.log_line(r"\] ready: process")
        received = server.http.post("/invocations", json={}, headers={HEADER: session}).json()
        assert received["count"] == 4
        assert received["pid"] != pid
