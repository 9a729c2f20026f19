"""The names of the adapters in a store, on disk and on S3."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from artifact_helpers import BUCKET, s3_server

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.serving.adapters import store_listing
from lmi_server.serving.adapters.store_listing import StoreListing


def listed(store: str, model_dir: Path, variables: dict[str, str] | None = None) -> Sequence[str]:
    listing = StoreListing(store, str(model_dir), artifact_settings(str(model_dir / "cache"), variables or {}))
    return asyncio.run(listing.names())


def test_folders_that_can_be_adapters_are_listed(tmp_path: Path) -> None:
    for name in ("b", "a-1.5", ".hidden", "with space"):
        (tmp_path / "store" / name).mkdir(parents=True)
    (tmp_path / "store" / "file").touch()
    (tmp_path / "store" / "broken").symlink_to(tmp_path / "gone")
    (tmp_path / "store" / "linked").symlink_to(tmp_path / "store" / "b")
    assert listed("store", tmp_path) == listed(str(tmp_path / "store"), tmp_path) == ["a-1.5", "b", "linked"]


def test_a_list_has_an_end(tmp_path: Path) -> None:
    for number in range(1001):
        (tmp_path / f"a{number}").mkdir()
    assert len(listed(".", tmp_path)) == 1000


def test_a_store_that_cannot_be_listed_has_no_names_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert listed("gone", tmp_path) == ()
    assert "the adapters in gone cannot be listed" in caplog.text


def test_folders_on_s3_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_listing, "_WAIT_S", 60.0)  # the import of boto3 alone takes seconds on a busy machine
    with s3_server(tmp_path) as s3:
        for key in ("loras/red/adapter_config.json", "loras/red/a/b", "loras/blue/c", "loras/file", "loras-2/other/c"):
            s3.put(key, b"{}")
        assert listed(f"s3://{BUCKET}/loras/", tmp_path, s3.variables) == ["blue", "red"]


def test_many_who_ask_at_once_are_one_look_at_the_store(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    listing = StoreListing(".", str(tmp_path), artifact_settings(str(tmp_path), {}))

    async def ask() -> Sequence[Sequence[str]]:
        first = await asyncio.gather(*(listing.names() for _ in range(10)))
        (tmp_path / "b").mkdir()
        return [*first, await listing.names()]

    assert {tuple(names) for names in asyncio.run(ask())} == {("a",)}
