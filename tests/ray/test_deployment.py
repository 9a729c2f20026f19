"""A model directory as a deployment of Ray Serve, without Ray and without a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.inventory import Machine
from lmi_server.ray.deployments.deployment import AUTOSCALING_POLICY, Deployment
from lmi_server.ray.deployments.model_files import deployments

CPU = Machine(total_bytes=2**34, available_bytes=2**33, cores=4, engines=frozenset({"torch", "transformers"}))
GPUS = replace(CPU, gpus=(Gpu("0", 2**34, 2**34), Gpu("1", 2**34, 2**34)))


def directory_with(tmp_path: Path, *lines: str) -> Path:
    directory = tmp_path / "model-a"
    directory.mkdir()
    (directory / "serving.properties").write_text("\n".join(("option.entryPoint=echo", *lines)))
    return directory


def resolved(directory: Path, machine: Machine = CPU) -> Deployment:
    (deployment,) = deployments([str(directory)], {}, machine)
    return deployment


def test_a_model_directory_is_a_deployment_of_one_replica(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "option.max_rolling_batch_size=7", "job_queue_size=50")
    assert resolved(directory).options() == {
        "name": "model_a",
        "num_replicas": 1,
        "max_ongoing_requests": 7,
        "max_queued_requests": 50,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
    }


def test_workers_become_replicas_and_a_gpu_a_resource(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "minWorkers=0", "maxWorkers=3", "option.max_rolling_batch_size=10")
    options = resolved(directory, replace(CPU, gpus=GPUS.gpus[:1])).options()
    assert options["autoscaling_config"] == {
        "min_replicas": 0,
        "max_replicas": 3,
        "target_ongoing_requests": 4.0,
        "policy": AUTOSCALING_POLICY,
    }
    assert "num_replicas" not in options
    assert options["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}


def test_ranks_become_bundles_of_one_node(tmp_path: Path) -> None:
    deployment = resolved(directory_with(tmp_path, "option.tensor_parallel_degree=2"), GPUS)
    bundle = {"CPU": 1, "GPU": 1}
    assert deployment.num_workers == 2
    assert deployment.options()["placement_group_bundles"] == [bundle, bundle]
    assert deployment.options()["placement_group_strategy"] == "STRICT_PACK"
    # The process beside the actor needs the GPU of the first bundle.
    assert deployment.options()["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}


def test_a_wrong_configuration_is_no_deployment(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_rolling_batch_size"):
        resolved(directory_with(tmp_path, "option.max_rolling_batch_size=no"))
