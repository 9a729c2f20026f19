"""Model files as deployments of Ray Serve: what `ray explain` shows, and the config file of `ray build`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_servers import run_command
from rayllm_files import AUTOSCALING

from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.inventory import Machine
from lmi_server.ray.deployments.deployment import Deployment
from lmi_server.ray.deployments.model_files import deployments, inspect_deployments
from lmi_server.ray.serve_config import plain, serve_config
from lmi_server.serving.models.model_store import Startup, startup_sources

pytest.importorskip("yaml")

CPU = Machine(total_bytes=2**34, available_bytes=2**33, cores=4, engines=frozenset({"torch", "transformers"}))

RAYLLM = (
    AUTOSCALING
    + """\
  max_concurrent_queries: 64
  health_check_period_s: 20
  ray_actor_options: {num_cpus: 1, resources: {"accelerator_type:A10G": 0.01}, runtime_env: {env_vars: {A: "2"}}}
engine_config:
  model_id: team/name-1.5
  hf_model_id: team/weights
  engine_kwargs: {max_num_seqs: 64}
  runtime_env: {env_vars: {A: "1"}, pip: [sentencepiece]}
scaling_config:
  num_workers: WORKERS
  num_cpus_per_worker: 8
  placement_strategy: PACK
  resources_per_worker: {"accelerator_type:A10G": 0.01}
"""
)
LLM_CONFIG = """\
model_loading_config: {model_id: qwen, model_source: Qwen/Qwen2.5-0.5B-Instruct}
accelerator_type: L4
engine_kwargs: {tensor_parallel_size: 2}
placement_group_config: {bundle_per_worker: {CPU: 2, GPU: 1}, strategy: SPREAD}
deployment_config: {num_replicas: auto, max_ongoing_requests: 50}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def resolved(tmp_path: Path, environment: dict[str, str], text: str) -> Deployment:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    [found] = deployments([str(path)], environment, CPU)
    return found


def test_a_file_of_rayllm_with_several_workers(tmp_path: Path, environment: dict[str, str]) -> None:
    found = resolved(tmp_path, environment, RAYLLM.replace("WORKERS", "2"))
    worker = {"CPU": 8, "GPU": 1, "accelerator_type:A10G": 0.01}
    assert found.options() == {
        "name": "team--name-1_5",
        "autoscaling_config": {
            "min_replicas": 1,
            "initial_replicas": 2,
            "max_replicas": 8,
            "target_ongoing_requests": 24,
            "metrics_interval_s": 10,
            "look_back_period_s": 30,
            "upscaling_factor": 0.6,
            "downscaling_factor": 0.6,
            "upscale_delay_s": 15,
            "downscale_delay_s": 300,
            "policy": {"policy_function": "lmi_server.ray.autoscaling:desired_replicas"},
        },
        "max_ongoing_requests": 64,
        "max_queued_requests": -1,
        "health_check_period_s": 20,
        "ray_actor_options": {
            "num_cpus": 9,
            "num_gpus": 1,
            "resources": {"accelerator_type:A10G": 0.02},
            "runtime_env": {"env_vars": {"A": "2"}, "pip": ["sentencepiece"]},
        },
        "placement_group_bundles": [{"CPU": 9, "GPU": 1, "accelerator_type:A10G": 0.02}, worker],
        "placement_group_strategy": "PACK",
    }
    assert (found.model_id, found.url, found.accelerator_type) == ("team/name-1.5", "team/weights", "A10G")
    assert found.settings["option.max_rolling_batch_size"] == "64"


def test_a_file_of_rayllm_with_one_worker_needs_no_placement_group(tmp_path: Path, environment: dict[str, str]) -> None:
    found = resolved(tmp_path, environment, RAYLLM.replace("WORKERS", "1"))
    assert found.placement is None
    options = found.options()["ray_actor_options"]
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (9, 1, {"accelerator_type:A10G": 0.02})


def test_an_llm_config(tmp_path: Path, environment: dict[str, str]) -> None:
    options = resolved(tmp_path, environment, LLM_CONFIG).options()
    bundle = {"accelerator_type:L4": 0.001, "CPU": 2, "GPU": 1}
    assert (options["placement_group_bundles"], options["placement_group_strategy"]) == ([bundle, bundle], "SPREAD")
    scaling = options["autoscaling_config"]
    assert [scaling[key] for key in ("min_replicas", "max_replicas", "target_ongoing_requests")] == [1, 100, 20]


def folder_with(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "echo").mkdir(parents=True)
    (folder / "echo" / "serving.properties").write_text("option.entryPoint=echo\n")
    (folder / "a.yaml").write_text(RAYLLM.replace("WORKERS", "2"))
    (folder / "off.yaml").write_text("enabled: false\nengine_config: {model_id: unused}\n")
    return folder


def test_a_folder_deploys_its_directories_and_its_enabled_files(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = folder_with(tmp_path)
    names = [found.name for found in deployments([str(folder)], environment, CPU)]
    assert names == ["team--name-1_5", "echo"]
    with pytest.raises(ConfigurationError, match="two models are named team--name-1_5"):
        deployments([str(folder / "a.yaml"), str(folder)], environment, CPU)
    (folder / "other.yaml").write_text(LLM_CONFIG.replace("qwen,", "team--name-1.5,"))
    with pytest.raises(ConfigurationError, match="two models are named team--name-1"):
        deployments([str(folder / "a.yaml"), str(folder / "other.yaml")], environment, CPU)
    with pytest.raises(ConfigurationError, match="missing: there is no such file or directory"):
        deployments([str(tmp_path / "missing")], environment, CPU)


def test_a_model_has_the_same_names_on_one_machine_and_on_a_cluster(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = folder_with(tmp_path)
    (folder / "off.yaml").unlink()
    (folder / "b.yml").write_text(LLM_CONFIG)
    (folder / "c").mkdir()
    (folder / "c" / "ray-model.yaml").write_text(LLM_CONFIG.replace("qwen,", "team/other,"))
    (folder / "c" / "config.json").write_text("{}")
    on_cluster = {found.path_name for found in deployments([str(folder)], environment, CPU)}
    assert on_cluster == {"team--name-1.5", "qwen", "team--other", "echo"}
    sources, _ = startup_sources(Startup(model_store=folder), environment)
    assert {source.name for source in sources} == on_cluster


def test_the_config_file_holds_the_whole_deployment(tmp_path: Path, environment: dict[str, str]) -> None:
    """`build` on the cluster gets from it what this machine has resolved."""
    found = deployments([str(folder_with(tmp_path))], environment, CPU)
    config = json.loads(json.dumps(serve_config(found, "0.0.0.0", 8080, 1, 60)))
    [application] = config["applications"]
    assert application["import_path"] == "lmi_server.ray.serve_config:build"
    again = msgspec.convert(application["args"]["models"], tuple[Deployment, ...])
    assert [plain(model) for model in again] == [plain(model) for model in found]
    assert [model.options() for model in again] == [model.options() for model in found]


@pytest.mark.slow
def test_ray_accepts_the_config_file(tmp_path: Path, environment: dict[str, str]) -> None:
    schema: Any = pytest.importorskip("ray.serve.schema")
    found = deployments([str(folder_with(tmp_path))], environment, CPU)
    checked = schema.ServeDeploySchema.model_validate(serve_config(found, "0.0.0.0", 8080, 1, 60))
    assert checked.applications[0].name == "lmi-server"
    import_module("ray.serve")  # the builder is what Ray imports and calls on the cluster
    arguments = checked.applications[0].args
    module, _, builder = checked.applications[0].import_path.partition(":")
    assert getattr(import_module(module), builder)(arguments) is not None
    for model in found:
        schema.DeploymentSchema.model_validate(model.options())


EVERY_OPTION = """\
deployment_config:
  num_replicas: 4
  placement_group_bundles: [{CPU: 1}, {CPU: 1}]
  placement_group_strategy: SPREAD
  placement_group_bundle_label_selector: [{zone: a}, {zone: b}]
  graceful_shutdown_wait_loop_s: 1
  graceful_shutdown_timeout_s: 300
  health_check_period_s: 20
  health_check_timeout_s: 40
  rolling_update_percentage: 0.5
  max_surge_percent: 50
  logging_config: {log_level: WARNING}
  user_config: {a: 1}
  request_router_config: {request_router_class: "elsewhere:Router"}
  backpressure_config: {}
engine_config: {model_id: team/weights}
"""


@pytest.mark.slow
def test_every_option_of_ray_serve_reaches_it_or_is_named_without_effect(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip("ray.serve")
    module = import_module("lmi_server.ray.application")
    (tmp_path / "m.yaml").write_text(EVERY_OPTION)
    [found] = inspect_deployments([str(tmp_path / "m.yaml")], environment, CPU)
    without = [warning.split()[1] for warning in found.warnings if "no effect" in warning]
    names = ("user_config", "request_router_config", "backpressure_config")
    assert sorted(without) == sorted(f"deployment_config.{name}" for name in names)
    bound = module._replica(found.deployment, drain_timeout_s=60.0)._bound_deployment
    serve = bound._deployment_config
    assert (serve.rolling_update_percentage, serve.max_surge_percent, serve.health_check_timeout_s) == (0.5, 50, 40)
    assert serve.user_config is None
    assert serve.request_router_config.request_router_class.startswith("lmi_server.")
    [start] = bound.init_args
    assert start["drain_timeout_s"] == 300
    assert serve.graceful_shutdown_timeout_s > 300
    replica = bound._replica_config
    assert replica.placement_group_strategy == "SPREAD"
    assert replica.placement_group_bundle_label_selector == [{"zone": "a"}, {"zone": "b"}]


def test_the_ranks_of_vllm_are_placed_by_the_replica_alone(tmp_path: Path, environment: dict[str, str]) -> None:
    text = LLM_CONFIG.replace("engine_kwargs: {", "engine_kwargs: {distributed_executor_backend: ray, ")
    (tmp_path / "m.yaml").write_text(f"llm_engine: vLLM\n{text}")
    machine = replace(CPU, engines=CPU.engines | {"vllm"})
    with pytest.raises(ConfigurationError, match=r"engine_kwargs\.distributed_executor_backend .* on a CPU"):
        deployments([str(tmp_path / "m.yaml")], environment, machine)
    machine = replace(machine, gpus=(Gpu("0", 2**34, 2**34),))
    with pytest.raises(ConfigurationError, match=r"qwen: option\.distributed_executor_backend = ray is not available"):
        deployments([str(tmp_path / "m.yaml")], environment, machine)


@pytest.mark.slow
def test_the_commands_need_no_ray(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = str(folder_with(tmp_path))

    def printed(*arguments: str) -> str:
        ran = run_command("ray", *arguments, env={**os.environ, **environment}, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert "bundle 0: CPU 9" in printed("explain", folder)
    assert [value["handler"] for value in json.loads(printed("explain", "--json", folder))][1] == "echo"
    file = tmp_path / "serve.yaml"
    assert file.name in printed("build", folder, "--output", file.name)
    assert len(json.loads(file.read_text())["applications"][0]["args"]["models"]) == 2
