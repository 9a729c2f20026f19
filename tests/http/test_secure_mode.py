"""A server in SageMaker's secure mode: what is registered while it runs obeys the controls too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import Server, running

from lmi_server.configuration.checks.secure_mode import CONTROLS

ECHO = "option.entryPoint=djl_python.echo\noption.enable_lora=true"


def make(directory: Path, *files: str, properties: str = ECHO) -> Path:
    directory.mkdir(parents=True)
    (directory / "serving.properties").write_text(properties)
    for name in files:
        (directory / name).write_text("")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model whose directory is trusted, because the untrusted channel is another one."""
    directory = tmp_path_factory.mktemp("secure")
    (directory / "channel").mkdir()
    variables = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": ",".join(CONTROLS),
        "SAGEMAKER_UNTRUSTED_CHANNELS": str(directory / "channel"),
        "SERVING_DOWNLOAD_DIR": str(directory / "downloads"),
    }
    with running(make(directory / "model", "trusted.bin"), variables=variables, workers=1) as server:
        yield server


def test_a_model_that_a_control_forbids_is_not_registered(server: Server, tmp_path: Path) -> None:
    url = str(make(tmp_path / "other", "model.py"))
    reply = server.http.post("/models", params={"url": url})
    assert (reply.status_code, "DISALLOW_CUSTOM_INFERENCE_SCRIPTS" in reply.text) == (400, True)
    reply = server.http.post("/models", params={"url": str(tmp_path / "other"), "option.env": "LD_PRELOAD=x"})
    assert (reply.status_code, "option.env" in reply.text) == (400, True)
    assert server.http.get("/models/other").status_code == 404


def test_what_the_server_unpacks_is_untrusted_wherever_it_came_from(server: Server, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "packed"), "gztar", make(tmp_path / "packed", "weights.pkl"))
    reply = server.http.post("/models", params={"url": archive})
    assert (reply.status_code, "weights.pkl is not allowed in secure mode" in reply.text) == (400, True)


@pytest.mark.parametrize("name", ["model.py", "requirements.txt", "adapter.bin", "adapter.pt", "adapter.ckpt"])
def test_an_adapter_that_a_control_forbids_is_not_registered(server: Server, tmp_path: Path, name: str) -> None:
    src = str(make(tmp_path / "adapter", name))
    reply = server.http.post("/models/model/adapters", params={"name": "bad", "src": src})
    assert (reply.status_code, f"{name} is not allowed in secure mode" in reply.text) == (400, True)
    assert server.http.get("/models/model/adapters").json()["adapters"] == []


def test_an_adapter_of_safetensors_is_registered_and_its_update_is_checked(server: Server, tmp_path: Path) -> None:
    src = make(tmp_path / "adapter", "adapter_model.safetensors")
    assert server.http.post("/models/model/adapters", params={"name": "good", "src": str(src)}).status_code == 200
    bad = make(tmp_path / "worse", "adapter.bin")
    reply = server.http.post("/models/model/adapters/good/update", params={"src": str(bad)})
    assert reply.status_code == 400
    assert server.http.get("/models/model/adapters/good").json()["src"] == str(src)
    assert server.http.delete("/models/model/adapters/good").status_code == 200
