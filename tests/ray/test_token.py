"""A cluster that asks for a token gets that of the user."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from ports import reserved_port
from ray_helpers import LIMIT_S

from lmi_server.ray.command import send_token


@pytest.mark.parametrize(
    ("has_file", "variables", "mode"),
    [
        (True, {}, "token"),
        (False, {}, None),
        (False, {"RAY_AUTH_TOKEN": "token"}, "token"),
        (True, {"RAY_AUTH_TOKEN_PATH": "/nowhere"}, None),
        (True, {"RAY_AUTH_MODE": "disabled"}, "disabled"),
    ],
)
def test_the_token_is_sent_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool, variables: dict[str, str], mode: str | None
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    if has_file:
        write_token(tmp_path)
    send_token(os.environ.copy())
    assert os.environ.get("RAY_AUTH_MODE") == mode


@pytest.mark.slow
def test_a_cluster_that_ray_has_started_is_joined_with_the_token(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install lmi-server[ray]")
    write_token(tmp_path)
    with reserved_port() as port:
        environment = os.environ | {"HOME": str(tmp_path), "RAY_ADDRESS": f"127.0.0.1:{port}"}
        environment.pop("RAY_AUTH_MODE", None)
        node = ("--head", "--block", "--port", str(port), "--num-cpus", "1", "--include-dashboard=false")
        started = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
        with subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), "start", *node],
            env=started,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as ray:
            try:
                assert ray.stdout is not None
                said = list(itertools.takewhile(lambda line: "Ray runtime started" not in line, ray.stdout))
                assert any("Token authentication is enabled" in line for line in said), "".join(said)
                command = [sys.executable, "-m", "lmi_server", "ray", "status"]
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
                )
                assert "nothing is deployed on the cluster; run lmi-server ray deploy" in done.stderr
            finally:
                os.killpg(ray.pid, signal.SIGKILL)


def write_token(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(uuid.uuid4().hex)
