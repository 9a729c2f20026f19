"""A model directory as a deployment of Ray Serve, without Ray and without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.inventory import Machine
from lmi_server.ray.deployments.deployment import AUTOSCALING_POLICY, Deployment, deployment_of

CPU = Machine(total_bytes=2**34, available_bytes=2**33, cores=4, engines=frozenset({"torch", "transformers"}))


def directory_with(tmp_path: Path, *lines: str) -> Path:
    directory = tmp_path / "model-a"
    directory.mkdir()
    (directory / "serving.properties").write_text("\n".join(("option.entryPoint=echo", *lines)))
    return directory


def resolved(directory: Path, accelerator_type: str | None = None) -> Deployment:
    return deployment_of(directory, {}, machine=CPU, accelerator_type=accelerator_type)


def test_a_model_directory_is_a_deployment_of_one_replica(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "option.max_rolling_batch_size=7", "job_queue_size=50")
    assert resolved(directory).options() == {
        "name": "model_a",
        "num_replicas": 1,
        "max_ongoing_requests": 7,
        "max_queued_requests": 50,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
    }


def test_workers_become_replicas_and_an_accelerator_a_resource(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "minWorkers=0", "maxWorkers=3", "option.max_rolling_batch_size=10")
    deployment = resolved(directory, "A10G")
    options = deployment.options()
    assert options["autoscaling_config"] == {
        "min_replicas": 0,
        "max_replicas": 3,
        "target_ongoing_requests": 4.0,
        "policy": AUTOSCALING_POLICY,
    }
    assert "num_replicas" not in options
    assert options["ray_actor_options"] == {
        "num_cpus": 1,
        "num_gpus": 1,
        "resources": {"accelerator_type:A10G": 0.001},
    }


def test_ranks_become_bundles_of_one_node(tmp_path: Path) -> None:
    deployment = resolved(directory_with(tmp_path, "option.tensor_parallel_degree=2"), "L4")
    bundle = {"CPU": 1, "GPU": 1, "accelerator_type:L4": 0.001}
    assert deployment.num_workers == 2
    assert deployment.options()["placement_group_bundles"] == [bundle, bundle]
    assert deployment.options()["placement_group_strategy"] == "STRICT_PACK"
    # The process beside the actor needs the GPU of the first bundle.
    resources = {"accelerator_type:L4": 0.001}
    assert deployment.options()["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1, "resources": resources}


def test_a_wrong_configuration_is_no_deployment(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_rolling_batch_size"):
        resolved(directory_with(tmp_path, "option.max_rolling_batch_size=no"))
