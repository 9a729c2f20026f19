"""The digest of a model's files: the same in any directory, another one for other weights or another configuration."""

from __future__ import annotations

import os
from pathlib import Path

from handlers.checkpoints.contents import contents_digest


def model(directory: Path, weights: bytes, config: str = "{}") -> str:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text(config)
    (directory / "serving.properties").write_text(f"option.model_id={directory}")
    return contents_digest(directory)


def test_a_directory_that_was_moved_or_copied_has_the_same_contents(tmp_path: Path) -> None:
    weights = os.urandom(9 * 2**20)
    first = model(tmp_path / "a", weights)
    assert model(tmp_path / "b", weights) == first
    assert contents_digest((tmp_path / "a").rename(tmp_path / "c")) == first


def test_other_weights_and_another_configuration_are_other_contents(tmp_path: Path) -> None:
    small, large = bytes(100_000), bytes(9 * 2**20)
    found = [
        model(tmp_path / "a", small),
        model(tmp_path / "b", small[:-1] + b"1"),
        model(tmp_path / "c", small, '{"a": 1}'),
        model(tmp_path / "d", large),
        model(tmp_path / "e", large + b"0"),
        model(tmp_path / "f", os.urandom(9 * 2**20)),
    ]
    assert len(set(found)) == len(found)
