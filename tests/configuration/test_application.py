"""Application files of Ray Serve LLM: each of their LLMConfigs is a model, and errors name file and line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lmi_server.artifacts.fetch import artifact_settings, fetch_model_directory
from lmi_server.artifacts.location import RAY_MODEL_FILE
from lmi_server.configuration.model_file.application import models_of
from lmi_server.configuration.model_file.read import ModelFile, read_model_file
from lmi_server.contract.errors import ConfigurationError
from lmi_server.ray.model_files import deployments
from lmi_server.serving.models.model_store import Startup, startup_sources

pytest.importorskip("yaml")

APPLICATION = """\
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
applications:
- name: llms
  route_prefix: "/"
  import_path: ray.serve.llm:build_openai_app
  runtime_env: {env_vars: {A: "1", B: "1"}}
  args:
    llm_configs:
    - model_loading_config: {model_id: team/small, model_source: team/weights}
      accelerator_config: {kind: cpu}
      runtime_env: {env_vars: {B: "2"}}
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 2}
    - model_loading_config:
        model_id: large
      accelerator_type: A10G
    - other.yaml
"""
OTHER = "model_loading_config: {model_id: other, model_source: team/weights}\naccelerator_config: {kind: cpu}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "other.yaml").write_text(OTHER)
    path = tmp_path / "app.yaml"
    path.write_text(APPLICATION)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def read(url: str, environment: dict[str, str]) -> ModelFile:
    """Read a model file as a server does, which has a model directory for it."""
    directory = asyncio.run(fetch_model_directory(url, artifact_settings(None, environment)))
    return read_model_file(directory / RAY_MODEL_FILE)


def raw(found: ModelFile) -> dict[str, str]:
    return {key: source.raw for key, source in found.given.items()}


def test_each_config_is_a_model_with_the_runtime_environment_of_its_application(
    file: Path, environment: dict[str, str]
) -> None:
    urls = models_of(file)
    assert urls == [f"{file}#team/small", f"{file}#large", str(file.with_name("other.yaml"))]
    small, large, other = (read(url, environment) for url in urls)
    assert raw(small) == {
        "option.served_model_name": "team/small",
        "option.model_id": "team/weights",
        "option.env": "A=1,B=2",
    }
    assert small.given["option.model_id"].place == f"{file}:10"
    assert (raw(large)["option.env"], raw(other).get("option.env")) == ("A=1,B=1", None)
    assert any("app.yaml:2: http_options has no effect here" in warning for warning in small.warnings)


def test_the_models_of_a_file_are_served_by_one_machine_and_by_a_cluster(
    file: Path, environment: dict[str, str]
) -> None:
    names = ["team--small", "large", "other"]
    sources, _ = startup_sources(Startup([file]), environment)
    assert [source.name for source in sources] == names
    found = deployments([str(file)], environment)
    assert [each.path_name for each in found] == names
    assert (found[0].autoscaling is not None, found[1].accelerator_type) == (True, "A10G")
    [one] = deployments([f"{file}#large"], environment)
    assert one == found[1]


def test_a_folder_has_the_models_of_its_files_once(file: Path, environment: dict[str, str]) -> None:
    sources, _ = startup_sources(Startup(model_store=file.parent), environment)
    assert sorted(source.name for source in sources) == ["large", "other", "team--small"]
    assert len(deployments([str(file.parent)], environment)) == 3


def test_the_arguments_of_the_builder_alone_are_an_application(tmp_path: Path, environment: dict[str, str]) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("llm_configs:\n- model_loading_config: {model_id: only}\n")
    assert models_of(path) == [f"{path}#only"]
    assert raw(read(str(path), environment))["option.served_model_name"] == "only"  # the file has no other


def test_a_file_with_several_models_is_none_by_itself(file: Path, environment: dict[str, str]) -> None:
    for url in (str(file), f"{file}#nothing"):
        with pytest.raises(
            ConfigurationError, match=r"app\.yaml: name one of its models, as .*#NAME: team/small, large"
        ):
            read(url, environment)


def test_other_files_are_models_themselves(file: Path) -> None:
    broken = file.with_name("broken.yaml")
    broken.write_text("a: [\n")
    assert [models_of(path) for path in (broken, file.with_name("other.yaml"))] == [
        [str(broken)],
        [str(file.with_name("other.yaml"))],
    ]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("ray.serve.llm:build_openai_app", "my:app", "app.yaml:6: import_path is not available; the models of ray"),
        ('route_prefix: "/"', "route_prefix: /llm", "app.yaml:5: route_prefix is not available; remove the key"),
        ("  args:", "  arg:", "app.yaml:8: unknown key arg; did you mean args?"),
        ("    llm_configs:", "    llm_config:", "app.yaml:9: unknown key args.llm_config; did you mean llm_configs?"),
        ("      accelerator_type: A10G", "      accelerator: A10G", "app.yaml:17: unknown key accelerator"),
        ("        model_id: large", "        id: large", "app.yaml:15: is no LLMConfig and no path of one"),
        ("        model_id: large", "        model_id: team/small", "app.yaml: two of its models are "),
        ("- name: llms", "- 7\n- name: llms", 'applications = "7" is not allowed'),
    ],
)
def test_what_cannot_be_read_or_served_is_refused_with_file_and_line(
    file: Path, environment: dict[str, str], before: str, after: str, problem: str
) -> None:
    assert before in APPLICATION
    file.write_text(APPLICATION.replace(before, after, 1))
    with pytest.raises(ConfigurationError) as refused:
        [read(url, environment) for url in models_of(file)]
    assert problem in refused.value.message
