"""What `check` finds among the files of a checkpoint without loading it."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest

from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.explain.checkpoint_files import file_faults, pipeline_faults

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4321\n"


def safetensors(path: Path, values: int = 4) -> Path:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * values))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a sound checkpoint in two shards."""
    for name in ("a", "b"):
        safetensors(tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"v": "a.safetensors", "w": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def faults(directory: Path) -> list[str]:
    return [line.removeprefix(f"{directory}") for line in file_faults(directory, needs_tokenizer=True)]


def test_a_sound_checkpoint(checkpoint: Path) -> None:
    assert faults(checkpoint) == []


def test_weights_that_are_missing(checkpoint: Path) -> None:
    (checkpoint / "b.safetensors").unlink()
    assert faults(checkpoint) == [
        "/b.safetensors: is missing, and the index or the other shards of the weights name it; copy it again",
    ]
    for file in checkpoint.glob("*.safetensors*"):
        file.unlink()
    (line,) = faults(checkpoint)
    assert line.startswith(": holds no weights (*.safetensors, *.bin, ")


def test_weights_that_are_cut(checkpoint: Path) -> None:
    path = checkpoint / "a.safetensors"
    whole = path.read_bytes()
    for length, fault in {
        len(whole) - 1: f"has {len(whole) - 1} bytes, and by its header it should have {len(whole)}; copy it again",
        20: "is cut within its header, or is no safetensors file; copy it again",
        3: "has 3 bytes and no header; copy it again",
    }.items():
        path.write_bytes(whole[:length])
        assert faults(checkpoint) == [f"/a.safetensors: {fault}"]


@pytest.mark.parametrize(
    "header",
    [
        "null",
        "[" * 100_000,
        '{"w": {"data_offsets": []}}',
        '{"w": {"data_offsets": [0, 1e999]}}',
        '{"w": {"data_offsets": [0, NaN]}}',
        '{"w": {"data_offsets": [0, %s]}}' % ("9" * 5000),
    ],
    ids=["null", "deep", "no offsets", "infinite", "no number", "too many digits"],
)
def test_a_header_of_weights_that_cannot_be_read(checkpoint: Path, header: str) -> None:
    (checkpoint / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    assert faults(checkpoint) == ["/a.safetensors: has a header that cannot be read; copy it again"]


@pytest.mark.parametrize("name", ["config.json", "model_index.json"])
def test_a_far_too_large_file_is_not_read_to_its_end(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    if name == "model_index.json":
        (line,) = pipeline_faults(tmp_path / name)
        assert "is larger than 16 MiB" in line
        return
    with pytest.raises(ConfigurationError, match=rf"{name}: cannot be read: is larger than 16 MiB"):
        inspect_model(tmp_path, {})


def test_an_archive_of_torch_that_is_cut(checkpoint: Path) -> None:
    path = checkpoint / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", bytes(1000))
    assert faults(checkpoint) == []
    path.write_bytes(path.read_bytes()[:500])
    assert faults(checkpoint) == ["/pytorch_model.bin: is cut: the end of the archive is missing; copy it again"]


def test_pointers_of_git_lfs(checkpoint: Path) -> None:
    for name in ("a.safetensors", "tokenizer.json"):
        (checkpoint / name).write_text(POINTER)
    message = "is a pointer of Git LFS and not the file itself; run git lfs pull where it was cloned"
    assert faults(checkpoint) == [f"/a.safetensors: {message}", f"/tokenizer.json: {message}"]


def test_a_missing_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert list(file_faults(checkpoint, needs_tokenizer=False)) == []
    (line,) = faults(checkpoint)
    assert line.startswith(": holds no tokenizer (tokenizer.json, tokenizer.model or others)")


def test_shards_without_an_index(checkpoint: Path) -> None:
    """The name of each says how many there are."""
    (checkpoint / "model.safetensors.index.json").unlink()
    for number in (1, 3):
        safetensors(checkpoint / f"model-0000{number}-of-00003.safetensors")
    (line,) = faults(checkpoint)
    assert line.startswith("/model-00002-of-00003.safetensors: is missing, and the index or the other shards")


def test_weights_that_are_empty(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").touch()
    assert faults(checkpoint) == ["/pytorch_model.bin: is empty; copy it again"]


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors.index.json", "generation_config.json"])
@pytest.mark.parametrize("cut", ["", '{"weight_map": {"v": "a.safe'])
def test_json_that_is_cut(checkpoint: Path, name: str, cut: str) -> None:
    (checkpoint / name).write_text(cut)
    assert faults(checkpoint) == [f"/{name}: is cut: it does not end as JSON does; copy it again"]


def test_files_about_a_tokenizer_are_none(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (checkpoint / name).write_text("{}")
    (line,) = faults(checkpoint)
    assert line.startswith(": holds no tokenizer")
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert faults(checkpoint) == [], "its tokens are bytes"


def test_a_broken_file_in_gguf_beside_the_weights(checkpoint: Path) -> None:
    (checkpoint / "copy.gguf").write_bytes(b"GGUF")
    (line,) = faults(checkpoint)
    assert line.startswith("/copy.gguf: is no file in GGUF, or is cut within its header")


@pytest.mark.parametrize("name", ["config.json", "model.gguf"])
def test_a_pointer_in_place_of_what_the_configuration_needs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(
        ConfigurationError, match=rf"{name}: is a pointer of Git LFS and not the file itself; run git lfs"
    ):
        inspect_model(tmp_path, {})


def test_the_parts_of_a_pipeline(tmp_path: Path) -> None:
    """diffusers' index names parts; null ones are not there, and the rest are in directories."""
    index = tmp_path / "model_index.json"
    parts = {name: ["diffusers", "A"] for name in ("unet", "vae", "scheduler", "text_encoder", "controlnet")}
    index.write_text(json.dumps({"_class_name": "B", "safety_checker": [None, None], **parts}))
    for name in ("unet", "vae", "scheduler", "text_encoder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    safetensors(tmp_path / "unet" / "a.safetensors")
    cut = safetensors(tmp_path / "vae" / "a.safetensors")
    cut.write_bytes(cut.read_bytes()[:-4])
    (tmp_path / "text_encoder" / "model.bin").write_bytes(b"a")
    shards = {"weight_map": {"v": "b.safetensors"}}
    (tmp_path / "unet" / "model.safetensors.index.json").write_text(json.dumps(shards))
    (tmp_path / "scheduler" / "config.json").write_text(POINTER)
    found = [line.removeprefix(f"{tmp_path}/").partition(";")[0] for line in pipeline_faults(index)]
    assert found == [
        "unet/b.safetensors: is missing, and the index or the other shards of the weights name it",
        f"vae/a.safetensors: has {cut.stat().st_size} bytes, and by its header it should have {cut.stat().st_size + 4}",
        "scheduler/config.json: is a pointer of Git LFS and not the file itself",
        "text_encoder/model.bin: is pickled, and only safetensors are loaded",
        "controlnet: is missing, and model_index.json names it",
    ]
    index.write_text("[")
    assert [": cannot be read: " in line for line in pipeline_faults(index)] == [True]
