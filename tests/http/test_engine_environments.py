"""Models with an engine of their own: two versions in one server, from wheels alone, and what is refused."""

from __future__ import annotations

import os
import shutil
import site
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from artifact_helpers import write_wheel
from installed_wheels import WORKER, write_installed
from own_code_helpers import make_own
from server_helpers import Server, running

from lmi_server.artifacts.environments.uv import find_uv

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_uv(os.environ) is None, reason="uv is not installed")]
CODE = """
import sys
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    import tinyengine
    found = {"version": tinyengine.version, "prefix": sys.prefix, "path": sys.path}
    try:
        import tinymore
        found["more"] = tinymore.value
    except ImportError:
        pass
    return Output().add_as_json(found)
"""


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> Iterator[Server]:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple"}
    variables = {"SERVING_DOWNLOAD_DIR": str(downloads), "PYTHONPATH": "/of/the/server", **nowhere}
    model = make_own(tmp_path_factory.mktemp("server") / "plain", "def handle(inputs):\n    return None\n")
    with running(model, variables=variables, workers=1) as server:
        yield server


def make(directory: Path, version: str, *wheels: str, **options: Any) -> Path:
    """Make a model with tinyengine in this version, and what a worker needs, in its wheelhouse."""
    make_own(directory, CODE, engine_requirements="engine.txt", **options)
    (directory / "engine.txt").write_text(f"tinyengine=={version}\n")
    for each in ("1.0", "2.0"):
        write_wheel(directory / "wheelhouse", "tinyengine", each, f"version = {each!r}")
    write_installed(directory / "wheelhouse", *(wheels or WORKER))
    return directory


def register(server: Server, directory: Path, **more: str) -> httpx.Response:
    return server.http.post("/models", params={"url": str(directory), **more})


def answer_of(server: Server, name: str) -> dict[str, Any]:
    answer = server.http.post(f"/predictions/{name}", content=b"{}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_two_models_run_with_two_versions_in_one_server(server: Server, downloads: Path, tmp_path: Path) -> None:
    for name, version in (("one", "1.0"), ("two", "2.0")):
        answer = register(server, make(tmp_path / name, version))
        assert answer.status_code == 200, answer.text
    one, two = answer_of(server, "one"), answer_of(server, "two")
    assert (one["version"], two["version"]) == ("1.0", "2.0")
    for found, name in ((one, "one"), (two, "two")):
        (described,) = server.http.get(f"/models/{name}").json()
        environment = described["models"][0]["environment"]
        assert environment["directory"] == found["prefix"]
        assert found["prefix"].startswith(str(downloads / "environments"))
        assert environment["packages"]["tinyengine"] == found["version"]
        assert {"msgspec", "pydantic", "uvloop"} <= environment["packages"].keys()
        assert not any(place in found["path"] for place in (*site.getsitepackages(), "/of/the/server"))
    (plain,) = server.http.get("/models/plain").json()
    assert "environment" not in plain["models"][0]


def test_a_model_that_asks_for_the_same_shares_it(server: Server, tmp_path: Path) -> None:
    shutil.copytree(make(tmp_path / "first", "1.0"), tmp_path / "second")
    for name in ("first", "second"):
        assert register(server, tmp_path / name).status_code == 200
    assert answer_of(server, "first")["prefix"] == answer_of(server, "second")["prefix"]


def test_its_requirements_txt_is_installed_beside_it(server: Server, tmp_path: Path) -> None:
    directory = make(tmp_path / "more", "1.0")
    (directory / "requirements.txt").write_text("tinymore\n")
    write_wheel(directory / "wheelhouse", "tinymore", "1.0", "value = 7")
    answer = register(server, directory)
    assert answer.status_code == 200, answer.text
    assert answer_of(server, "more")["more"] == 7


def test_what_uv_cannot_install_is_said_with_its_words(server: Server, tmp_path: Path) -> None:
    refused = register(server, make(tmp_path / "absent", "3.0"))
    message = refused.json()["message"]
    assert "option.engine_requirements = engine.txt: msgspec, pydantic>=2.7, uvloop, tinyengine==3.0" in message
    assert "there is no version of tinyengine==3.0" in message


def test_an_environment_in_which_a_worker_cannot_run_is_refused(server: Server, tmp_path: Path) -> None:
    directory = make(tmp_path / "lacking", "1.0")
    for wheel in (directory / "wheelhouse").glob("pydantic-*.whl"):
        wheel.unlink()
    write_wheel(directory / "wheelhouse", "pydantic", "2.99")  # of that name, but without what a worker imports
    refused = register(server, directory)
    message = refused.json()["message"]
    assert "a worker cannot import" in message
    assert "lines of the file of option.engine_requirements" in message


def test_secure_mode_refuses_both_keys(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "1.0")
    controls = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_REQUIREMENTS_TXT"}
    with running(model, variables={**controls, "SERVING_WAIT_MODEL_LOADING": "false"}) as server:
        server.log_line(r"option\.engine_requirements is not allowed in secure mode; remove the key")
