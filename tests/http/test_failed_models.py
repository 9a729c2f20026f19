"""Models that cannot be loaded, beside one that can: what the API, the log and the codes say of them, over HTTP."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from server_helpers import Server, make_model, request, running
from waiting import wait_until

pytestmark = pytest.mark.slow


class Failing(NamedTuple):
    """How a model fails: the status and the type of the answer to a registration, and a part of the reason."""

    status: int
    kind: str
    reason: str


FAILING = {
    "damaged": Failing(500, "EngineException", "damaged/model.safetensors: SafetensorError"),
    "cut": Failing(500, "EngineException", "cut/model.safetensors: SafetensorError"),
    "no_config": Failing(400, "IllegalConfigurationException", "no_config: holds no config.json"),
    "climbing": Failing(500, "EngineException", "climbing.tar.gz: entry '../evil' leads out of the archive"),
    "huge": Failing(507, "WlmOutOfMemoryException", "allocate memory"),
    "unsatisfiable": Failing(500, "EngineException", "No matching distribution found for nobody-has-this==1"),
}


# A server that starts treats all errors of a load alike.
ONLY_REGISTERED = {"cut", "huge"}
AT_START = FAILING.keys() - ONLY_REGISTERED


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("around") / "store"  # other tests write next to their own directories
    directory.mkdir()
    make_model(directory / "good")
    checkpoint(directory / "damaged").write_bytes(b"\xff" * 4096)
    (directory / "no_config").mkdir()
    (directory / "no_config" / "serving.properties").write_text("option.rolling_batch=scheduler")
    with tarfile.open(directory / "climbing.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../evil"), io.BytesIO())
    unsatisfiable = make_model(directory / "unsatisfiable")
    (unsatisfiable / "requirements.txt").write_text("nobody-has-this==1\n")
    (unsatisfiable / "wheelhouse").mkdir()
    return directory


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the models that are not in the store."""
    directory = tmp_path_factory.mktemp("others")
    weights = checkpoint(directory / "cut")
    weights.write_bytes(weights.read_bytes()[:-1000])
    grow(checkpoint(directory / "huge", hidden_size=8192, vocab_size=200_000_000))
    return directory


def checkpoint(directory: Path, **more: Any) -> Path:
    """Make the directory of a tiny model and return the path of its weights; `more` is what config.json says else."""
    from tiny_models import FAMILIES, saved_model
    from transformers import LlamaForCausalLM

    config = FAMILIES["llama"]()
    saved_model(LlamaForCausalLM(config), directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | more))
    (directory / "serving.properties").write_text("option.rolling_batch=scheduler")
    return directory / "model.safetensors"


def grow(weights: Path) -> None:
    """Make weights as large as config.json says, which take no room on the disk."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights.parent))
    end, tensors = 0, {}
    for name, tensor in model.state_dict().items():
        start, end = end, end + 4 * tensor.numel()
        tensors[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(tensors).encode()
    with weights.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    downloads = str(tmp_path_factory.mktemp("downloads"))
    variables = {"SERVING_DOWNLOAD_DIR": downloads}
    with running("--model-store", store, variables=variables, libraries="transformers") as server:
        wait_until(lambda: "PENDING" not in server.http.get("/models").text, "every model is loaded or has failed")
        yield server


@pytest.mark.parametrize("name", sorted(AT_START))
def test_a_model_fails_with_its_reason(server: Server, store: Path, name: str) -> None:
    failing = FAILING[name]
    ((element,), ping) = server.http.get(f"/models/{name}").json(), server.http.get("/ping")
    (model,) = element["models"]
    assert model["status"] == "FAILED"
    assert failing.reason in model["reason"]
    assert (ping.status_code, ping.json()[name]) == (500, {"status": "FAILED"})
    refused = server.http.post(f"/predictions/{name}", json=request("a"))
    assert (refused.status_code, failing.reason in refused.json()["message"]) == (503, True)
    assert_refused(server, model["modelUrl"], failing)


@pytest.mark.parametrize("name", sorted(ONLY_REGISTERED))
def test_a_registration_fails_with_its_reason(server: Server, others: Path, name: str) -> None:
    assert_refused(server, str(others / name), FAILING[name])


def assert_refused(server: Server, url: str, failing: Failing) -> None:
    again = server.http.post("/models", params={"url": url, "model_name": "again"})
    assert (again.status_code, again.json()["type"]) == (failing.status, failing.kind)
    assert failing.reason in again.json()["message"]
    assert server.http.get("/models/again").status_code == 404
    assert server.http.post("/predictions/good", json=request("a")).status_code == 200, "the others serve on"


def test_nothing_of_a_refused_archive_is_left(server: Server, store: Path) -> None:
    assert not list(store.parent.glob("**/evil"))


def test_the_server_is_live_until_the_last_model_has_failed(server: Server) -> None:
    assert server.http.get("/health/ready").status_code == 503
    assert server.http.get("/health/live").status_code == 200
    server.http.delete("/models/good")
    assert server.http.get("/health/live").status_code == 500
    assert server.http.get("/ping").json().keys() == AT_START
    for name in AT_START:
        server.http.delete(f"/models/{name}")
    assert server.http.get("/ping").status_code == 200


def test_the_log_has_every_reason(server: Server) -> None:
    assert server.stop() == 0
    for name in AT_START:
        failing = FAILING[name]
        found = [line for line in server.lines if "ERROR" in line and f"model {name} could not be loaded: " in line]
        assert failing.reason in found[0]
