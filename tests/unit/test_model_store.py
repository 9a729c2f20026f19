from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_server.contract.errors import ConfigurationError
from lmi_server.serving.models.model_store import (
    ModelSource,
    Startup,
    discover,
    is_one_model,
    is_spec,
    name_of,
    parse_spec,
    startup_sources,
)


def model(directory: Path, file: str = "serving.properties") -> Path:
    directory.mkdir(parents=True)
    (directory / file).touch()
    return directory


NOWHERE = Path("/nowhere")  # so that the machine's own /opt/ml/model is not looked at


def started(startup: Startup, **environment: str) -> dict[str, str]:
    """Return the url of each model by its label."""
    return {source.label: source.url for source in startup_sources(startup, environment)[0]}


def test_every_directory_and_archive_of_a_store_is_a_model(tmp_path: Path) -> None:
    model(tmp_path / "b-1")
    model(tmp_path / "a", "config.json")
    for name in ("c.tar.gz", "d.zip", ".DS_Store", ".hidden.zip"):
        (tmp_path / name).touch()
    (tmp_path / ".git").mkdir()
    assert started(Startup(model_store=tmp_path)) == {
        "a": f"{tmp_path}/a",
        "b_1": f"{tmp_path}/b-1",
        "c": f"{tmp_path}/c.tar.gz",
        "d": f"{tmp_path}/d.zip",
    }


def test_a_store_with_files_is_itself_one_model(tmp_path: Path) -> None:
    store = model(tmp_path / "my-model")
    (store / "adapters").mkdir()
    assert started(Startup(model_store=store)) == {"my_model": str(store)}


def test_a_directory_with_one_directory_or_archive_is_that(tmp_path: Path) -> None:
    nested = model(tmp_path / "outer" / "inner")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "model.zip").touch()
    model(tmp_path / "two" / "first")
    model(tmp_path / "two" / "second")
    assert started(Startup(model_store=tmp_path)) == {
        "inner": str(nested),
        "model": f"{tmp_path}/packed/model.zip",
        "two": f"{tmp_path}/two",
    }


def test_an_empty_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    sources, warnings = startup_sources(Startup(model_store=tmp_path), {})
    assert sources == []
    assert warnings == [
        f"{tmp_path}/lost+found: is empty and is no model",
        f"model_store {tmp_path} holds no model",
        "no model is named; name a MODEL, --model-store, --models or HF_MODEL_ID, or POST it to /models",
    ]


def test_a_store_that_is_not_there_is_reported(tmp_path: Path) -> None:
    first = model(tmp_path / "first")
    sources, warnings = startup_sources(Startup([first], model_store=tmp_path / "store"), {})
    assert [source.name for source in sources] == ["first"]
    assert warnings == [f"model_store {tmp_path}/store: there is no such directory"]


def test_two_models_of_one_name(tmp_path: Path) -> None:
    model(tmp_path / "a")
    (tmp_path / "a.zip").touch()
    with pytest.raises(ConfigurationError, match=r"two models are named a: .*/a and .*/a\.zip; rename one"):
        started(Startup(model_store=tmp_path))


def test_load_models(tmp_path: Path) -> None:
    model(tmp_path / "a")
    model(tmp_path / "b")
    assert started(Startup(model_store=tmp_path, load_models="NONE")) == {}
    assert started(Startup(model_store=tmp_path, load_models="b")) == {"b": f"{tmp_path}/b"}
    assert started(Startup(model_store=tmp_path, load_models="x=a, y:2=b")) == {
        "x": f"{tmp_path}/a",
        "y:2": f"{tmp_path}/b",
    }


def test_directories_and_store_together(tmp_path: Path) -> None:
    first = model(tmp_path / "first")
    second = model(tmp_path / "store" / "second")
    startup = Startup([first], model_store=tmp_path / "store")
    assert started(startup) == {"first": str(first), "second": str(second)}


def test_of_the_store_only_the_specs_are_loaded(tmp_path: Path) -> None:
    first = model(tmp_path / "first")
    second = model(tmp_path / "store" / "second")
    model(tmp_path / "store" / "not-named")
    startup = Startup([first], ["third=Owner/Model,[fourth=s3://bucket/prefix/]", "b=second"], tmp_path / "store")
    assert started(startup) == {
        "first": str(first),
        "third": "Owner/Model",
        "fourth": "s3://bucket/prefix/",
        "b": str(second),
    }


def test_what_is_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that exists is none, even if it reads like one; nor is a path that does not exist."""
    path = model(tmp_path / "a=b")
    model(tmp_path / "Owner" / "Model")
    monkeypatch.chdir(tmp_path)
    specs = ["x=/m", "[x:1]=/m", "file:/m", "s3://b/p", "Owner/Other", "Owner/Other:Q4_0", "x=Owner/Model"]
    assert all(is_spec(text) for text in specs)
    paths = [str(tmp_path / "missing"), "missing", "./Owner/Other", "Owner/Other/", "a/b/c", "a/b.zip", "Owner/Model"]
    assert not any(is_spec(text) for text in (*paths, str(path)))


def test_a_path_with_a_comma(tmp_path: Path) -> None:
    path = model(tmp_path / "a,b")
    assert started(Startup(specs=[f"m={path}"])) == {"m": str(path)}


def test_the_hub_model_stands_beside_the_store(tmp_path: Path) -> None:
    model(tmp_path / "a", "config.json")
    assert started(Startup(model_store=tmp_path), HF_MODEL_ID="Owner/Model-7B") == {
        "Owner_Model_7B": "Owner/Model-7B",
        "a": f"{tmp_path}/a",
    }


def test_sagemaker_s_directory_is_the_default_store(tmp_path: Path) -> None:
    store = model(tmp_path / "opt" / "model")
    assert started(Startup(fallback_store=store)) == {"model": str(store)}
    (source,), _ = startup_sources(Startup(fallback_store=store), {"HF_MODEL_ID": "Owner/M"})
    assert (source.url, source.variables) == (str(store), {"HF_MODEL_ID": "Owner/M"})
    other = model(tmp_path / "other")
    for startup in (Startup([other], fallback_store=store), Startup(specs=[str(other)], fallback_store=store)):
        assert started(startup) == {"other": str(other)}
    assert started(Startup(load_models="NONE", fallback_store=store)) == {}


def test_an_empty_directory_of_sagemaker_leaves_the_hub_model(tmp_path: Path) -> None:
    assert started(Startup(fallback_store=tmp_path), HF_MODEL_ID="Owner/M") == {"Owner_M": "Owner/M"}


@pytest.mark.parametrize("load_models", ["ALL", "NONE"])
def test_a_server_without_models_says_how_to_name_one(load_models: str) -> None:
    _, warnings = startup_sources(Startup(load_models=load_models, fallback_store=NOWHERE), {})
    assert [text.partition(";")[0] for text in warnings] == ["no model is named"] * (load_models == "ALL")


@pytest.mark.parametrize("load_models", ["ALL", "NONE"])
def test_the_hub_model_alone(load_models: str) -> None:
    sources, _ = startup_sources(
        Startup(load_models=load_models, fallback_store=NOWHERE), {"HF_MODEL_ID": "Owner/M", "HF_TASK": "x", "A": "b"}
    )
    assert sources == [ModelSource("Owner/M", "Owner_M", variables={"HF_MODEL_ID": "Owner/M", "HF_TASK": "x"})]


def test_the_hub_model_completes_the_one_directory(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    for startup in (Startup([directory]), Startup(model_store=directory)):
        (source,), _ = startup_sources(startup, {"HF_MODEL_ID": "Owner/M"})
        assert (source.name, source.url, source.variables) == ("model", str(directory), {"HF_MODEL_ID": "Owner/M"})


def test_the_hub_model_may_be_a_path(tmp_path: Path) -> None:
    directory = model(tmp_path / "my.model", "config.json")
    assert started(Startup(fallback_store=NOWHERE), HF_MODEL_ID=str(directory)) == {"my_model": str(directory)}


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("/m/a-b", ModelSource("/m/a-b", "a_b")),
        ("x=/m/a", ModelSource("/m/a", "x")),
        ("x:1.2=/m/a", ModelSource("/m/a", "x", "1.2")),
        (
            "x:1:Python:0;gpu1=/m/a.zip",
            ModelSource("/m/a.zip", "x", "1", {"engine": "Python", "load_on_devices": "0;gpu1"}),
        ),
        ("x:::*=s3://b/p", ModelSource("s3://b/p", "x")),
        (":1=s3://b/p/model.tar.gz", ModelSource("s3://b/p/model.tar.gz", "model", "1")),
        ("[x=/m/a=b]", ModelSource("/m/a=b", "x")),
        ("[abc]=/m/a", ModelSource("/m/a", "abc")),
        ("[x:v1:Python:cpu]=/m/a", ModelSource("/m/a", "x", "v1", {"engine": "Python", "load_on_devices": "cpu"})),
        ("[::Python]=file:///m/a-b/", ModelSource("file:///m/a-b/", "a_b", None, {"engine": "Python"})),
        ("file:/m/a%20b", ModelSource("file:/m/a%20b", "a_b")),
        ("/m/a=b", ModelSource("/m/a=b", "a_b")),
        ("s3://b/p?model_name=x&batch_size=2", ModelSource("s3://b/p", "x", None, {"batch_size": "2"})),
    ],
)
def test_specs(spec: str, source: ModelSource) -> None:
    assert parse_spec(spec) == source


def test_a_spec_without_url() -> None:
    with pytest.raises(ConfigurationError, match=r'model "x=" has no URL; allowed: url or \[name:version'):
        parse_spec("x=")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/m/resnet-18.tar.gz", "resnet_18"),
        ("/m/dir.zip/", "dir_zip"),
        ("s3://bucket/a/b.c/", "b_c"),
        ("s3://bucket", "bucket"),
        ("Qwen/Qwen2.5-0.5B", "Qwen_Qwen2_5_0_5B"),
        ("/", "model"),
        ("file:///m/resnet-18.tar.gz", "resnet_18"),
        ("file:/m/dir.zip/", "dir_zip"),
        ("/m/smol-135m.Q4_1.gguf", "smol_135m_Q4_1"),
        ("Qwen/Qwen2.5-GGUF:Q4_0", "Qwen_Qwen2_5_GGUF_Q4_0"),
    ],
)
def test_names(url: str, name: str) -> None:
    assert name_of(url) == name


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Be a user to whom modes of files apply, if root runs the tests."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_store_that_cannot_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as store:  # not tmp_path, whose parents are root's alone
        Path(store).chmod(0)
        with without_privileges(), pytest.raises(ConfigurationError, match=f"{store}: cannot be read: Permission"):
            startup_sources(Startup(model_store=Path(store)), {})


def test_each_model_file_of_a_store_is_a_model(tmp_path: Path) -> None:
    for name in ("team--a.yaml", "b.yml"):
        (tmp_path / name).touch()
    assert not is_one_model(tmp_path)
    found, warnings = discover(tmp_path)
    assert ([source.name for source in found], warnings) == (["b", "team__a"], [])
    (tmp_path / "config.json").touch()
    assert is_one_model(tmp_path)
