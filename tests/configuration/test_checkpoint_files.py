"""What `check` finds among the files of a checkpoint without loading it."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest

from lmi_server.explain.checkpoint_files import file_faults

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
        "/b.safetensors: is missing, and the index of the weights names it; copy it again",
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
    path.write_bytes(struct.pack("<Q", 4) + b"null")
    assert faults(checkpoint) == ["/a.safetensors: has a header that cannot be read; copy it again"]


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
