from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.artifacts.location import (
    GgufFile,
    HubModel,
    LocalArchive,
    LocalDirectory,
    S3Location,
    archive_stem,
    parse_location,
    refuse_remote_entry_point,
)


def test_paths_are_relative_to_the_model_directory(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.tar.gz").touch()
    for text in ("weights", "./weights", str(tmp_path / "weights"), f"file://{tmp_path}/weights"):
        assert parse_location(text, tmp_path) == LocalDirectory(tmp_path / "weights")
    assert parse_location("model.tar.gz", tmp_path) == LocalArchive(tmp_path / "model.tar.gz")


@pytest.mark.parametrize("text", ["gpt2", "org/model", "org/model-1.5_b"])
def test_hub_ids(tmp_path: Path, text: str) -> None:
    assert parse_location(text, tmp_path) == HubModel(text)


@pytest.mark.parametrize("name", ["workflow.json", "chain.json"])
def test_workflows_are_refused_by_that_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name} defines a workflow; workflows are not served; register each"):
        parse_location(name, tmp_path)


def test_models_in_gguf(tmp_path: Path) -> None:
    (tmp_path / "m-Q4_0.gguf").touch()
    assert parse_location("m-Q4_0.gguf", tmp_path) == GgufFile(tmp_path / "m-Q4_0.gguf")
    of_the_hub = parse_location("org/model-GGUF:Q4_0", tmp_path)
    assert of_the_hub == HubModel("org/model-GGUF", "Q4_0")
    assert of_the_hub.id == "org/model-GGUF:Q4_0"


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://my.bucket/a/b/", "my.bucket", "a/b"),
        ("s3://bucket/a?b#c", "bucket", "a?b#c"),
    ],
)
def test_s3_urls(tmp_path: Path, url: str, bucket: str, prefix: str) -> None:
    assert parse_location(url, tmp_path) == S3Location(bucket, prefix)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://host/model.tar.gz", "is not available: the server fetches no model over HTTP; download it"),
        ("http://host/model", "is not available: the server fetches no model over HTTP"),
        ("hdfs://host/model", "use a local directory or archive"),
        ("s3://", "allowed: s3://bucket/prefix"),
        ("s3:///key", "allowed: s3://bucket/prefix"),
        ("./nowhere", "there is no directory"),
        ("nowhere.zip", "there is no archive"),
        ("a/b/c", "and it is no id of a Hugging Face model"),
        (f"a/b/{'c' * 300}", "and it is no id of a Hugging Face model"),
    ],
)
def test_what_is_no_location_is_refused_with_its_remedy(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_location(text, tmp_path)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"neither a directory nor a \.tar\.gz"):
        parse_location("model.bin", tmp_path)


@given(st.text())
def test_any_text_is_a_location_or_a_value_error(text: str) -> None:
    base = Path("/nonexistent")
    try:
        location = parse_location(text, base)
    except ValueError:
        return
    assert isinstance(location, HubModel | S3Location | LocalDirectory | LocalArchive)


@pytest.mark.parametrize(
    ("name", "stem"),
    [("a/model.tar.gz", "model"), ("M.TGZ", "M"), ("x.mar", "x"), ("x.tar.bz2", None), (".zip", None), ("model", None)],
)
def test_archive_stem(name: str, stem: str | None) -> None:
    assert archive_stem(name) == stem


def test_an_entry_point_is_not_downloaded() -> None:
    refuse_remote_entry_point("djl_python.huggingface")
    with pytest.raises(ValueError, match=r"the server downloads no code; put the file into the model directory"):
        refuse_remote_entry_point("https://host/model.py")
