"""Models of the Hugging Face hub, fetched by the real library from a fake hub, and from its cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_hub import fake_hub
from forked_servers import run_python

MODEL = "team/tiny"
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "sub/tokenizer.json": b"[]"}
# The library reads its variables when it is imported, so each fetch has a process of its own: a fork, in which all else
# is imported.
FETCH = """
import sys
from lmi_server.artifacts.hub import fetch_hub_model
from lmi_server.artifacts.location import HubModel
from lmi_server.artifacts.progress import Activity
from lmi_server.contract.errors import ArtifactError
try:
    shown = lambda progress: print(progress.done, progress.total, progress.what, file=sys.stderr)
    repo_id, _, quantization = sys.argv[1].partition(":")
    print(fetch_hub_model(HubModel(repo_id, quantization or None), sys.argv[2] or None, Activity(shown)))
except ArtifactError as error:
    print("ArtifactError:", error.message)
"""


def fetch(home: Path, endpoint: str, model: str = MODEL, revision: str = "", **variables: str) -> tuple[str, str]:
    """Return what a fetch gave, and its progress."""
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "PATH": os.environ["PATH"],
        "HF_HUB_ETAG_TIMEOUT": "5",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    script = home.parent / "fetch.py"
    script.write_text(FETCH)
    done = run_python([str(script), model, revision], environment | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


NOBODY = "http://127.0.0.1:1"


def test_a_model_is_fetched_once_and_is_there_offline(tmp_path: Path) -> None:
    ignored = {"pytorch_model.bin": b"the same", "flax_model.msgpack": b"", "onnx/model.onnx": b""}
    with fake_hub(MODEL, FILES | ignored) as hub:
        directory, progress = fetch(tmp_path, hub.url)
        assert {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()} == set(FILES)
        assert (Path(directory) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert "7004 7004 fetching team/tiny from the Hugging Face hub" in progress
        assert sorted(hub.requested) == sorted(FILES)
        assert fetch(tmp_path, hub.url, revision=hub.commit)[0] == directory
        assert len(hub.requested) == len(FILES)
    assert fetch(tmp_path, NOBODY)[0] == directory
    assert fetch(tmp_path, NOBODY, HF_HUB_OFFLINE="1")[0] == directory


@pytest.mark.slow
def test_pickled_weights_are_fetched_if_there_are_no_others(tmp_path: Path) -> None:
    with fake_hub(MODEL, {"config.json": b"{}", "pytorch_model.bin": b"weights"}) as hub:
        directory, _ = fetch(tmp_path, hub.url)
    assert (Path(directory) / "pytorch_model.bin").read_bytes() == b"weights"
    assert fetch(tmp_path, NOBODY)[0] == directory


@pytest.mark.slow
def test_a_pipeline_is_fetched_without_its_pickled_copies(tmp_path: Path) -> None:
    whole = {"model_index.json": b"{}", "unet/a.safetensors": b"u", "vae/config.json": b"{ }"}
    copies = ("model.ckpt", "unet/diffusion_pytorch_model.bin", "text_encoder/pytorch_model.bin")
    with fake_hub(MODEL, {**whole, **dict.fromkeys(copies, b"p")}) as hub:
        path, _ = fetch(tmp_path, hub.url)
        assert sorted(hub.requested) == sorted(whole)
    assert (Path(path) / "unet" / "a.safetensors").read_bytes() == b"u"


@pytest.mark.slow
def test_of_several_files_in_gguf_one_is_fetched(tmp_path: Path) -> None:
    in_gguf = {"m-Q4_0.gguf": b"four", "m-Q8_0.gguf": b"eight", "mmproj-m.gguf": b"", "README.md": b""}
    with fake_hub(MODEL, in_gguf) as hub:
        several, _ = fetch(tmp_path, hub.url)
        assert several.endswith(
            "team/tiny: names 2 files in GGUF, and one is served; name the model as team/tiny:PART with a part of one "
            "file's name; of m-Q4_0.gguf, m-Q8_0.gguf"
        )
        path, _ = fetch(tmp_path, hub.url, model=f"{MODEL}:q8_0")
        assert (Path(path).name, Path(path).read_bytes()) == ("m-Q8_0.gguf", b"eight")
        assert "m-Q4_0.gguf" not in hub.requested
        assert "names 0 files in GGUF" in fetch(tmp_path, hub.url, model=f"{MODEL}:Q5")[0]
    assert fetch(tmp_path, NOBODY, model=f"{MODEL}:q8_0")[0] == path
    with fake_hub(MODEL, {**FILES, "m-Q4_0.gguf": b"a copy"}) as hub:
        fetch(tmp_path / "other", hub.url)
        assert "m-Q4_0.gguf" not in hub.requested


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"])
def test_neither_network_nor_cache(tmp_path: Path, offline: str) -> None:
    found, _ = fetch(tmp_path, NOBODY, HF_HUB_OFFLINE=offline)
    assert found.startswith(
        "ArtifactError: team/tiny: the hub cannot be reached, and the model is not in the cache; "
        "give this machine access to the hub (HF_ENDPOINT names another hub) and unset HF_HUB_OFFLINE, or"
    )


@pytest.mark.slow
def test_an_incomplete_cache_is_not_used(tmp_path: Path) -> None:
    with fake_hub(MODEL, FILES) as hub:
        directory, _ = fetch(tmp_path, hub.url)
    (Path(directory) / "model.safetensors").unlink()
    found, _ = fetch(tmp_path, NOBODY)
    assert "the hub cannot be reached, and the cached copy is incomplete; give this machine access" in found


def test_what_the_hub_does_not_have(tmp_path: Path) -> None:
    with fake_hub(MODEL, FILES) as hub:
        found, _ = fetch(tmp_path, hub.url, model="team/other")
        assert found.startswith(
            "ArtifactError: team/other: there is no such directory, and the hub has no such model, or it"
        )
        found, _ = fetch(tmp_path, hub.url, revision="v9")
        assert "team/tiny: the model has no revision 'v9'; check option.revision" in found
