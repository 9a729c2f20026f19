"""The entry of the artifacts, and a server whose model comes from S3."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from artifact_helpers import BUCKET, S3, s3_server, write_wheel
from paths import TESTS
from process_log import ProcessLog
from relay_helpers import on_loop

from lmi_server.artifacts.fetch import (
    Artifacts,
    ArtifactSettings,
    artifact_settings,
    fetch_artifacts,
    fetch_model_directory,
)
from lmi_server.artifacts.unpacking.limits import ArchiveLimits
from lmi_server.commands.local_model import local_model
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ArtifactError, ConfigurationError, LmiServerError
from lmi_server.contract.metrics import drop_metric
from lmi_server.contract.progress import Progress
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.ray.deployments.model_files import deployments
from lmi_server.serving.adapters.adapters import fetch_adapter
from lmi_server.serving.models.fetch_model import fetch_model
from lmi_server.serving.models.loader import ModelLoader
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_store import ModelSource, parse_spec

BROKEN_INDEX = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:1/simple"}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture
def settings(tmp_path: Path) -> ArtifactSettings:
    return artifact_settings(str(tmp_path / "downloads"), BROKEN_INDEX)


def tar_of(path: Path, **files: str) -> Path:
    source = path.parent / f"{path.name}-source"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_text(content)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(source, ".")
    return path


def test_where_files_are_kept() -> None:
    assert artifact_settings("/downloads", {}).root == Path("/downloads")
    assert artifact_settings(None, {"XDG_CACHE_HOME": "/cache"}).root == Path("/cache/lmi-server")


def test_commands_without_a_server_keep_files_where_the_variables_say() -> None:
    variables = {"XDG_CACHE_HOME": "/cache", "DJL_CACHE_DIR": "/of/lmi"}
    assert artifact_settings(None, variables).root == Path("/of/lmi")
    assert artifact_settings(None, {**variables, "SERVING_DOWNLOAD_DIR": "/own"}).root == Path("/own")
    assert artifact_settings("/downloads", {**variables, "SERVING_DOWNLOAD_DIR": "/own"}).root == Path("/downloads")


@on_loop
async def test_a_local_model_is_taken_as_it_is(tmp_path: Path, settings: ArtifactSettings) -> None:
    (tmp_path / "weights").mkdir()
    assert await fetch_artifacts(tmp_path, str(tmp_path), settings) == Artifacts(str(tmp_path))
    assert await fetch_artifacts(tmp_path, "weights", settings) == Artifacts(str(tmp_path / "weights"))
    assert not settings.root.exists()


@on_loop
async def test_an_archive_is_extracted_once_for_each_state_of_it(tmp_path: Path, settings: ArtifactSettings) -> None:
    archive = tar_of(tmp_path / "model.tar.gz", config="1")
    first = await fetch_model_directory(str(archive), settings)
    assert (first.name, (first / "config").read_text()) == ("model", "1")
    (first / "config").write_text("kept")
    assert (await fetch_artifacts(tmp_path, "model.tar.gz", settings)).model_id == str(first)
    assert (first / "config").read_text() == "kept"
    os.utime(archive, ns=(1, 1))
    assert await fetch_model_directory(str(archive), settings) != first


@on_loop
async def test_a_refused_archive_leaves_nothing(tmp_path: Path, settings: ArtifactSettings) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as packed:
        packed.writestr("config.json", "{}")
        packed.writestr("../evil", "x")
    with pytest.raises(ArtifactError, match="leads out of the archive"):
        await fetch_model_directory(str(tmp_path / "model.zip"), settings)
    assert [path.suffix for path in (settings.root / "archives").iterdir()] == [".lock"]


@on_loop
async def test_limits_are_those_of_the_settings(tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "model.tar.gz", one="1", two="2")
    settings = ArtifactSettings(tmp_path / "downloads", {}, limits=ArchiveLimits(entries=2))
    with pytest.raises(ArtifactError, match="holds more than 2 entries"):
        await fetch_model_directory(str(archive), settings)


@on_loop
async def test_a_directory_with_one_archive_stands_for_it(tmp_path: Path, settings: ArtifactSettings) -> None:
    directory = tmp_path / "channel"
    directory.mkdir()
    tar_of(tmp_path / "model.tar.gz", config="1").rename(directory / "model.tar.gz")
    found = await fetch_model_directory(str(directory), settings)
    assert [path.name for path in found.iterdir()] == ["config"]
    (directory / "serving.properties").touch()
    assert await fetch_model_directory(str(directory), settings) == directory


@pytest.mark.parametrize("text", ["https://host/model.tar.gz", "./nowhere", "nowhere.tar.gz"])
def test_what_is_no_place_is_refused(tmp_path: Path, settings: ArtifactSettings, text: str) -> None:
    with pytest.raises(ArtifactError, match=f'^model "{re.escape(text)}" is not'):
        asyncio.run(fetch_artifacts(tmp_path, text, settings))


def test_no_part_of_a_password_is_in_the_reason_however_long_it_is(tmp_path: Path, settings: ArtifactSettings) -> None:
    url = f"ftp://user:{'secret' * 500}@host/model"
    loader = ModelLoader({}, settings, inspect_model, {}, drop_metric)
    reads = (
        lambda: asyncio.run(fetch_artifacts(tmp_path, url, settings)),
        lambda: asyncio.run(fetch_adapter(url, str(tmp_path), settings)),
        lambda: asyncio.run(loader.fetch(Model(ModelSource(url, "m"), at_startup=False))),
        lambda: local_model(url, {}),
        lambda: parse_spec(f"[{url}]="),
    )
    for read in reads:
        with pytest.raises(LmiServerError) as refused:
            read()
        assert "secret" not in SECRETS.mask(refused.value.message)
        assert "://***@host/model" in refused.value.message
        assert len(refused.value.message) < 1000


@pytest.mark.slow
@on_loop
async def test_requirements_are_installed_and_progress_arrives_on_the_loop(
    tmp_path: Path, settings: ArtifactSettings
) -> None:
    (tmp_path / "requirements.txt").write_text("tinyone\n")
    write_wheel(tmp_path / "wheelhouse", "tinyone", "1.0")
    loop, seen = asyncio.get_running_loop(), []

    def on_progress(progress: Progress) -> None:
        assert asyncio.get_running_loop() is loop
        seen.append(progress.what)

    artifacts = await fetch_artifacts(tmp_path, ".", settings, on_progress=on_progress)
    (target,) = artifacts.python_path
    assert (Path(target) / "tinyone.py").is_file()
    assert set(seen) == {f"installing {tmp_path / 'requirements.txt'}"}


@pytest.mark.slow
@on_loop
async def test_a_cancelled_fetch_lets_go_of_everything(tmp_path: Path, settings: ArtifactSettings) -> None:
    (tmp_path / "requirements.txt").write_text("tinyone\n")
    write_wheel(tmp_path / "wheelhouse", "tinyone", "1.0")
    begun = asyncio.Event()
    fetching = asyncio.create_task(fetch_artifacts(tmp_path, ".", settings, on_progress=lambda progress: begun.set()))
    await begun.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    artifacts = await fetch_artifacts(tmp_path, ".", settings)
    assert (Path(artifacts.python_path[0]) / "tinyone.py").is_file()


@pytest.mark.slow
@on_loop
async def test_an_archive_on_s3_is_extracted(tmp_path: Path, s3: S3) -> None:
    s3.put("packed/model.tar.gz", tar_of(tmp_path / "model.tar.gz", config="1").read_bytes())
    settings = artifact_settings(str(tmp_path / "downloads"), s3.variables)
    directory = await fetch_model_directory(f"s3://{BUCKET}/packed/model.tar.gz", settings)
    assert (directory.name, [path.name for path in directory.iterdir()]) == ("model", ["config"])


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@on_loop
async def test_the_weights_of_a_file_of_rayllm_come_from_its_mirror(tmp_path: Path, s3: S3, scheme: str) -> None:
    """So they do for each replica of a cluster, which is given the mirror in the place of a model directory."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 77}
    for name, content in (("config.json", json.dumps(config).encode()), ("model.safetensors", b"w" * 1000)):
        s3.put(f"mirror/{name}", content)
    model_file = tmp_path / "m.yaml"
    section = {"s3": "s3_mirror_config", "gs": "gcs_mirror_config"}[scheme]
    mirror = f"{section}: {{bucket_uri: {scheme}://{BUCKET}/mirror}}"
    model_file.write_text(f"engine_config:\n  model_id: team/name\n  hf_model_id: not/had\n  {mirror}\n")
    variables = s3.variables if scheme == "s3" else s3.variables_of_google()
    settings = artifact_settings(str(tmp_path / "downloads"), variables)
    directory = await fetch_model_directory(str(model_file), settings)
    fetched = await fetch_model(directory, {}, {}, settings)
    assert "team/name" in fetched.resolved.served_names
    [deployment] = await asyncio.to_thread(deployments, [str(model_file)], variables)
    assert deployment.url == f"{scheme}://{BUCKET}/mirror"
    of_replica = await fetch_model_directory(deployment.url, settings)
    for place in (Path(str(fetched.resolved.options.model_id)), of_replica):
        assert (place / "model.safetensors").read_bytes() == b"w" * 1000


@on_loop
async def test_a_wrong_configuration_is_reported_before_anything_is_fetched(
    tmp_path: Path, settings: ArtifactSettings
) -> None:
    for wrong in ("job_queue_size=0", "option.pipeline_parallel_degree=2"):  # not allowed; not served by huggingface
        (tmp_path / "serving.properties").write_text(f"option.model_id=s3://bucket/model\n{wrong}\n")
        with pytest.raises(ConfigurationError, match=wrong.replace("=", ' = "')):
            await fetch_model(tmp_path, {}, {}, settings)
    assert not settings.root.exists()


@contextmanager
def server_log(model_dir: Path, root: Path, variables: dict[str, str]) -> Iterator[ProcessLog]:
    """Serve a model directory in a process of its own, and give its log."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lmi_server", "serve", str(model_dir), "--host", "127.0.0.1", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=variables | {"PYTHONPATH": str(TESTS.parent), "SERVING_DOWNLOAD_DIR": str(root)},
    )
    log = ProcessLog(process.stderr)
    try:
        yield log
    finally:
        process.terminate()
        log.close()
        process.wait(30)


@pytest.mark.slow
def test_a_model_on_s3_is_served_with_the_adapters_that_requests_ask_for(tmp_path: Path, s3: S3) -> None:
    s3.put("loras/one/adapter_config.json", b"{}")
    s3.put("echo/config.json", b'{"architectures": ["TinyForCausalLM"]}')
    s3.put("echo/weights", b"w" * 5000)
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "serving.properties").write_text(
        f"option.entryPoint=djl_python.echo\noption.model_id=s3://{BUCKET}/echo\n"
        f"option.enable_lora=true\noption.dynamic_lora_loading_path=s3://{BUCKET}/loras\n"
    )
    with server_log(model_dir, tmp_path / "downloads", s3.variables) as log:
        url = log.wait_for(r"listening on (http://\S+)")[1] + "/invocations"
        log.wait_for(r"\] ready: process")
        body = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
        answer = httpx.post(url, json=body, timeout=120)
        adapted = httpx.post(url, json=body | {"adapters": "one"}, timeout=120)
        unknown = httpx.post(url, json=body | {"adapters": "two"}, timeout=120)
    assert adapted.json() == {"generated_text": " one: a"}
    assert (unknown.status_code, "two" in unknown.text) == (404, True)
    assert (answer.status_code, answer.json()["generated_text"]) == (200, " a b")
    assert f"[model] downloading s3://{BUCKET}/echo: 4.9 KiB of 4.9 KiB (100 %)" in "".join(log.lines)
    (fetched,) = (tmp_path / "downloads" / "s3").glob("*/echo")
    assert (fetched / "weights").read_bytes() == b"w" * 5000


@pytest.mark.slow
def test_a_model_that_cannot_be_fetched_fails_with_the_reason(tmp_path: Path, s3: S3) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "serving.properties").write_text(
        "option.entryPoint=djl_python.echo\noption.model_id=s3://nowhere/echo\n"
    )
    with server_log(model_dir, tmp_path / "downloads", s3.variables) as log:
        line = log.wait_for("could not be loaded")
    assert "s3://nowhere/echo: there is no bucket nowhere at http://127.0.0.1:" in line.string
