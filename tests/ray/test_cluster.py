"""A cluster of two nodes on this machine: what it serves, and that nothing that Ray does loses a request."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray_helpers import RayCluster, echo_model, loaded
from waiting import wait_until

from lmi_server.ray.deployment import ActorOptions, Autoscaling, Deployment, Placement, deployment_of

pytest.importorskip("ray", reason="Ray is not installed: pip install lmi-server[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of which there are always three replicas."""
    return echo_model(tmp_path_factory.mktemp("models") / "fixed", 5, minWorkers=3, maxWorkers=3)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return a model with one to three replicas, each for two requests."""
    directory = echo_model(tmp_path_factory.mktemp("models") / "scaled", 5)
    scaling = Autoscaling(
        min_replicas=1,
        max_replicas=3,
        target_ongoing_requests=2,
        metrics_interval_s=0.2,
        look_back_period_s=1,
        upscale_delay_s=0,
        downscale_delay_s=1,
    )
    return replace(deployment_of(directory, {}), autoscaling=scaling)


@pytest.fixture(scope="module")
def asleep(scaled: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return a model that has no replica while nobody asks for it."""
    directory = echo_model(tmp_path_factory.mktemp("models") / "asleep", 5)
    assert scaled.autoscaling is not None
    scaling = replace(scaled.autoscaling, min_replicas=0, max_replicas=1)
    return replace(deployment_of(directory, {}), autoscaling=scaling)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return a model whose replica has two ranks with a GPU each, which Ray takes to be there."""
    directory = echo_model(tmp_path_factory.mktemp("models") / "ranked", 5, load_on_devices="cpu")
    bundle = {"CPU": 1.0, "GPU": 1.0}
    actor = ActorOptions(num_cpus=1, num_gpus=1)
    return replace(deployment_of(directory, {}), num_workers=2, actor=actor, placement=Placement((bundle, bundle)))


def test_models_are_served_as_on_one_machine(
    cluster: RayCluster, fixed: Path, scaled: Deployment, ranked: Deployment, asleep: Deployment
) -> None:
    cluster.deploy(deployment_of(fixed, {}), scaled, ranked, asleep)
    cluster.until_ready("fixed", 3)
    cluster.until_ready("scaled", 1)
    body = {"model": "fixed", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
    assert cluster.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == " a b"
    unknown = cluster.http.post("/v1/chat/completions", json=body | {"model": "other"})
    assert unknown.status_code == 404
    assert cluster.http.post("/predictions/fixed", json={"inputs": 1}).status_code == 424


def test_status_names_the_replicas(cluster: RayCluster) -> None:
    command = [sys.executable, "-m", "lmi_server", "ray", "status"]
    shown = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=True, timeout=120)
    status = json.loads(shown.stdout)
    assert status["status"] == "RUNNING"
    assert status["deployments"]["fixed"]["replicas"] == {"RUNNING": 3}


def test_a_replica_sees_the_gpus_of_all_its_ranks(cluster: RayCluster) -> None:
    assert sorted(cluster.variables("ranked")["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"]


def test_ray_scales_by_what_replicas_hold_and_ends_no_stream(cluster: RayCluster) -> None:
    with loaded(cluster, "scaled", clients=8) as load:
        cluster.until_ready("scaled", 3)
    with loaded(cluster, "scaled", clients=2, tokens=400) as few:
        cluster.until_ready("scaled", 1)
    assert set(load.endings) == set(few.endings) == {"200"}
    assert set(load.streams) == set(few.streams) == {"whole"}


def test_a_request_wakes_a_model_without_replicas(cluster: RayCluster) -> None:
    cluster.until_ready("asleep", 0)
    answer = cluster.http.post("/predictions/asleep", json={"inputs": "a b", "parameters": {"max_new_tokens": 2}})
    assert answer.json() == {"generated_text": " a b"}


def test_a_killed_replica_costs_streams_alone(cluster: RayCluster) -> None:
    with loaded(cluster, "fixed") as load:
        cluster.kill(cluster.replicas("fixed")[0])
        wait_until(lambda: cluster.ready("fixed") < 3, "the front end has lost a replica")
        cluster.until_ready("fixed", 3)
    assert set(load.endings) == {"200"}
    assert set(load.streams) <= {"whole", "error"}


def test_a_controller_that_starts_again_costs_nothing(cluster: RayCluster) -> None:
    with loaded(cluster, "fixed") as load:
        cluster.kill("SERVE_CONTROLLER_ACTOR", restarts=True)
        wait_until(lambda: sum(load.endings.values()) > 30, "requests end")
    assert set(load.endings) == {"200"}
    assert set(load.streams) == {"whole"}


def test_a_new_version_replaces_replicas_and_loses_nothing(
    cluster: RayCluster, fixed: Path, scaled: Deployment, ranked: Deployment, asleep: Deployment
) -> None:
    before = set(cluster.replicas("fixed"))
    properties = fixed / "serving.properties"
    properties.write_text(properties.read_text().replace("delay_ms=5", "delay_ms=4"))
    others = set(cluster.replicas("scaled"))
    with loaded(cluster, "fixed") as load:
        cluster.deploy(deployment_of(fixed, {}), scaled, ranked, asleep)
        wait_until(lambda: not before & set(cluster.replicas("fixed")), "every replica is a new one")
        cluster.until_ready("fixed", 3)
    assert set(load.endings) == {"200"}
    assert set(load.streams) == {"whole"}
    assert others & set(cluster.replicas("scaled"))  # a model that is the same keeps its replicas


def test_a_node_that_dies_costs_streams_alone(cluster: RayCluster) -> None:
    with loaded(cluster, "fixed") as load:
        cluster.remove_node()
        wait_until(lambda: sum(load.endings.values()) > 30, "requests end")
    assert set(load.endings) == {"200"}
    assert set(load.streams) <= {"whole", "error"}
    cluster.until_ready("fixed", 3)
