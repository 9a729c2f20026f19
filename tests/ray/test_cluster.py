"""A cluster of three nodes on this machine: what it serves, and that nothing that Ray does loses a request."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray_helpers
from forked_servers import ForkedPython, run_python
from paths import ROOT
from ray_helpers import COMMAND, LIMIT_S, RayCluster, echo_model, loaded, started_cluster, tiny_models_of_a_cluster
from waiting import wait_until

from lmi_server.contract.errors import ConfigurationError
from lmi_server.ray.deployments.deployment import ActorOptions, Autoscaling, Deployment, Placement
from lmi_server.ray.deployments.model_files import deployments

pytest.importorskip("ray", reason="Ray is not installed: pip install lmi-server[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


STARTS = 4  # of a local cluster, before a machine is too busy for it
FIXED = 2  # replicas of a model; each start of one takes some seconds of a processor
DELAY_MS = 20  # of each token: with more tokens in the same time, clients take the processors from Ray
until = partial(wait_until, limit_s=LIMIT_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = started_cluster()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of which there are always as many replicas."""
    return echo_model(tmp_path_factory.mktemp("models") / "fixed", DELAY_MS, minWorkers=FIXED, maxWorkers=FIXED)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return a model with one to three replicas, each for two requests."""
    directory = echo_model(tmp_path_factory.mktemp("models") / "scaled", DELAY_MS)
    scaling = Autoscaling(
        min_replicas=1,
        max_replicas=3,
        target_ongoing_requests=2,
        metrics_interval_s=0.2,
        look_back_period_s=1,
        upscale_delay_s=0,
        downscale_delay_s=1,
    )
    return replace(deployments([str(directory)], {})[0], autoscaling=scaling)


@pytest.fixture(scope="module")
def asleep(scaled: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return a model that has no replica while nobody asks for it."""
    directory = echo_model(tmp_path_factory.mktemp("models") / "asleep", 5)
    assert scaled.autoscaling is not None
    scaling = replace(scaled.autoscaling, min_replicas=0, max_replicas=1)
    return replace(deployments([str(directory)], {})[0], autoscaling=scaling)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return a model whose replica has two ranks with two devices each, which Ray takes to be there."""
    directory = echo_model(tmp_path_factory.mktemp("models") / "ranked", 5, load_on_devices="cpu")
    bundle = {"CPU": 1.0, "GPU": 1.0, "neuron_cores": 1.0}
    actor = ActorOptions(num_cpus=1, num_gpus=1, resources={"neuron_cores": 1})
    return replace(
        deployments([str(directory)], {})[0], num_workers=2, actor=actor, placement=Placement((bundle, bundle))
    )


def test_a_cluster_that_nobody_listens_for_is_refused_at_once() -> None:
    """By itself, Ray tries for minutes, and logs five warnings per minute that do not name the variable."""
    from lmi_server.ray.cluster import status

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"localhost:{silent.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"RAY_ADDRESS = {address}: no cluster listens there .*to auto"):
            status({"RAY_ADDRESS": address})


def test_a_node_that_does_not_start_in_time_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's time-out is a fake here, with Ray's words, its class and a line more: no test can cause it."""
    import ray

    from lmi_server.ray import cluster
    from lmi_server.ray.application import IngressSettings

    def time_out(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setattr(ray, "init", time_out)
    for name in cluster._LOCAL_VARIABLES:
        monkeypatch.setenv(name, "1")  # a value that the user has set is kept, and this process stays as it is
    with pytest.raises(ConfigurationError) as refused:
        list(cluster.deploy([], IngressSettings(), dict(os.environ)))
    assert refused.value.message.startswith("no cluster of Ray can be started on this machine; The current node timed")
    assert "run ray start --head first and set RAY_ADDRESS=auto" in refused.value.message
    assert "\n" not in refused.value.message


def test_a_cluster_of_tests_has_a_second_try_at_the_limit_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = ["The current node timed out during startup. This could", "Head node temp_dir not found"]

    class FakeCluster:
        def __init__(self) -> None:
            if tries:
                raise Exception(tries.pop(0))

    monkeypatch.setattr(ray_helpers, "RayCluster", FakeCluster)
    with pytest.raises(Exception, match="temp_dir not found"):
        started_cluster()
    tries[:] = ["The current node timed out during startup. This could"]
    assert isinstance(started_cluster(), FakeCluster)
    tries[:] = ["Head node temp_dir not found", "unreached"]
    with pytest.raises(Exception, match="temp_dir not found"):
        started_cluster()
    assert tries == ["unreached"]


def test_a_replica_that_cannot_start_is_told_in_one_line() -> None:
    from lmi_server.ray.cluster import shorten

    failed = (
        "A replica failed. Retrying 2 more time(s). Error:\n\x1b[36mray::ServeReplica\x1b[39m (pid=1)\n  raise it\n"
    )
    assert shorten(f"{failed}RuntimeError: model.py is gone\n\n") == (
        "A replica failed. Retrying 2 more time(s). model.py is gone"
    )
    assert shorten("More than 30s to be scheduled.\nResources: {}") == "More than 30s to be scheduled. Resources: {}"


MARK = "STARTED_BY_TEST"
LOADING_FOR_EVER = """\
import pathlib, time
pathlib.Path(__file__).with_name("loading").touch()
time.sleep(100_000)
"""


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose load never ends; there is a file `loading` in it once that has begun."""
    directory = tmp_path_factory.mktemp("models") / "unfinished"
    directory.mkdir()
    (directory / "model.py").write_text(LOADING_FOR_EVER)
    return directory


def interrupted(
    loading: Path, number: signal.Signals, process_of_ray: str | None = None, **variables: str
) -> tuple[int, str]:
    """Send a signal to `lmi-server ray deploy` while the model loads, or once a process of Ray runs.

    Return exit code and output. Ray has fixed limits for the start of a node, half a minute at most. A machine that is
    busy with other tests may exceed them; then the command has ended by itself, and is run again.
    """

    def has_begun() -> bool:
        if process_of_ray is None:
            return (loading / "loading").exists()
        return any(process_of_ray in name for name in processes_with(f"{MARK}={loading}"))

    for _ in range(STARTS):
        (loading / "loading").unlink(missing_ok=True)
        with deploying(loading, variables) as process:
            until(lambda: has_begun() or process.poll() is not None, "it has begun")
            is_running = process.poll() is None
            if is_running:
                assert "RAY_ADDRESS" in variables or processes_with(f"{MARK}={loading}")
                process.send_signal(number)
            code = process.wait(LIMIT_S)
            output = process.stdout.read()
        if is_running:
            return code, output
        assert "no cluster of Ray can be started" in output, output
    raise AssertionError(output)


@contextlib.contextmanager
def deploying(model: Path, variables: dict[str, str]) -> Iterator[ForkedPython]:
    """Run `lmi-server ray deploy` in a fork; the processes that it starts have MARK as a variable."""
    arguments = [COMMAND, "deploy", str(model), "--host", "127.0.0.1", "--port", "0"]
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = ForkedPython(arguments, inherited | {MARK: str(model), "PYTHONPATH": str(ROOT)} | variables, "ray")
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("process", ["gcs_server", None], ids=["starting", "loading"])
def test_a_signal_while_models_are_deployed_ends_the_local_cluster(
    loading: Path, number: signal.Signals, process: str | None
) -> None:
    code, output = interrupted(loading, number, process)
    assert code == 0, output
    assert "Traceback" not in output
    assert "SIGTERM" not in output  # what Ray says if its own handler ends the process, and that it has none
    until(lambda: not processes_with(f"{MARK}={loading}"), "every process of the cluster has ended")


def processes_with(variable: str) -> list[str]:
    """Return the names of the processes that have a variable, which processes of Ray inherit."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that has just ended
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "comm").read_text())
    return found


def test_models_are_served_as_on_one_machine(
    cluster: RayCluster, fixed: Path, scaled: Deployment, ranked: Deployment, asleep: Deployment
) -> None:
    cluster.deploy(deployments([str(fixed)], {})[0], scaled, ranked, asleep)
    cluster.until_ready("fixed", FIXED)
    cluster.until_ready("scaled", 1)
    body = {"model": "fixed", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
    assert cluster.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == " a b"
    unknown = cluster.http.post("/v1/chat/completions", json=body | {"model": "other"})
    assert unknown.status_code == 404
    assert cluster.http.post("/predictions/fixed", json={"inputs": 1}).status_code == 424


def test_status_names_the_replicas(cluster: RayCluster) -> None:
    shown = run_python([COMMAND, "status"], cluster.environment, "ray")
    assert shown.returncode == 0, shown.stderr
    status = json.loads(shown.stdout)
    assert status["status"] == "RUNNING"
    assert status["deployments"]["fixed"]["replicas"] == {"RUNNING": FIXED}


def test_a_replica_sees_the_devices_of_all_its_ranks(cluster: RayCluster) -> None:
    variables = cluster.variables("ranked")
    assert sorted(variables["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"]
    assert sorted(variables["NEURON_RT_VISIBLE_CORES"].split(",")) == ["0", "1"]


def test_ray_scales_by_what_replicas_hold_and_ends_no_stream(cluster: RayCluster) -> None:
    with loaded(cluster, "scaled", clients=8) as load:
        cluster.until_ready("scaled", 3)
    with loaded(cluster, "scaled", clients=2, tokens=100) as few:
        cluster.until_ready("scaled", 1)
    assert set(load.endings) == set(few.endings) == {"200"}
    assert set(load.streams) == set(few.streams) == {"whole"}


def test_a_request_wakes_a_model_without_replicas(cluster: RayCluster) -> None:
    cluster.until_described("asleep")
    cluster.until_ready("asleep", 0)
    answer = cluster.http.post("/predictions/asleep", json={"inputs": "a b", "parameters": {"max_new_tokens": 2}})
    assert answer.json() == {"generated_text": " a b"}


def test_a_killed_replica_costs_streams_alone(cluster: RayCluster) -> None:
    with loaded(cluster, "fixed") as load:
        cluster.kill(cluster.replicas("fixed")[0])
        until(lambda: cluster.ready("fixed") < FIXED, "the front end has lost a replica")
        cluster.until_ready("fixed", FIXED)
    assert set(load.endings) == {"200"}
    assert set(load.streams) <= {"whole", "error"}


def test_a_controller_that_starts_again_costs_nothing(cluster: RayCluster) -> None:
    with loaded(cluster, "fixed") as load:
        cluster.kill("SERVE_CONTROLLER_ACTOR", restarts=True)
        until(lambda: sum(load.endings.values()) > 30, "requests end")
    assert set(load.endings) == {"200"}
    assert set(load.streams) == {"whole"}


def test_a_new_version_replaces_replicas_and_loses_nothing(
    cluster: RayCluster, fixed: Path, scaled: Deployment, ranked: Deployment, asleep: Deployment
) -> None:
    before = set(cluster.replicas("fixed"))
    properties = fixed / "serving.properties"
    properties.write_text(properties.read_text().replace(f"delay_ms={DELAY_MS}", f"delay_ms={DELAY_MS - 1}"))
    others = set(cluster.replicas("scaled"))
    with loaded(cluster, "fixed") as load:
        cluster.deploy(deployments([str(fixed)], {})[0], scaled, ranked, asleep)
        until(lambda: not before & set(cluster.replicas("fixed")), "every replica is a new one")
        cluster.until_ready("fixed", FIXED)
    assert set(load.endings) == {"200"}
    assert set(load.streams) == {"whole"}
    assert others & set(cluster.replicas("scaled"))  # a model that is the same keeps its replicas


# The endings of requests to a front end that is killed, or that loses its replicas before.
LOST = {"200", "503", "ConnectError", "ReadError", "RemoteProtocolError"}


def test_a_front_end_that_dies_costs_its_own_connections_alone(cluster: RayCluster) -> None:
    dying, other = cluster.front_ends()
    with loaded(cluster, "fixed") as lost, loaded(cluster, "fixed", url=other.url) as load:
        until(lambda: lost.endings and load.endings, "both front ends answer")
        os.kill(dying.process, signal.SIGKILL)
        until(lambda: sum(load.endings.values()) > 30, "requests end")
    assert set(load.endings) == {"200"}
    assert set(load.streams) == {"whole"}
    assert set(lost.endings) <= LOST
    until(lambda: dying.process not in {each.process for each in cluster.front_ends()}, "Ray has started another one")
    cluster.until_ready("fixed", FIXED)


def test_a_node_that_dies_costs_its_connections_and_streams_alone(cluster: RayCluster) -> None:
    """Its front end is started on the node that has had none."""
    kept, dying = cluster.front_ends()
    with loaded(cluster, "fixed") as load, loaded(cluster, "fixed", url=dying.url) as lost:
        until(lambda: lost.endings and load.endings, "both front ends answer")
        cluster.remove_node(dying.node)
        until(lambda: sum(load.endings.values()) > 30, "requests end")
    assert set(load.endings) == {"200"}
    assert set(load.streams) <= {"whole", "error"}
    assert set(lost.endings) <= LOST
    assert set(lost.streams) <= {"whole", "error"}
    again = cluster.front_ends()
    assert kept in again
    assert dying.node not in {each.node for each in again}
    cluster.until_ready("fixed", FIXED)


@pytest.fixture(scope="module")
def tiny(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Deploy a small random Llama twice, in the place of all others: by an LLMConfig, and by a file of RayLLM."""
    return cluster.deploy_by_command(*tiny_models_of_a_cluster(tmp_path_factory.mktemp("tiny")))


def completion(cluster: RayCluster, model: str, **more: Any) -> str:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{cluster.http.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model=model, prompt="ab", max_tokens=12, temperature=0, **more)
    return str(answer.choices[0].text)


def test_model_files_are_deployed_by_the_command_and_answer_openais_client(cluster: RayCluster, tiny: str) -> None:
    assert "serving team/tiny, split on http://127.0.0.1:" in tiny
    listed = [entry["id"] for entry in cluster.http.get("/v1/models").json()["data"]]
    assert listed == ["split", "team--tiny", "team/tiny", *(f"team/tiny:{name}" for name in ("blue", "green", "red"))]
    assert completion(cluster, "team/tiny") == completion(cluster, "team--tiny")
    generated = cluster.http.post(
        "/predictions/team--tiny", json={"inputs": "ab", "parameters": {"max_new_tokens": 12}}
    )
    assert generated.json() == {"generated_text": completion(cluster, "team/tiny")}


def test_two_ranks_in_a_placement_group_of_one_node_generate_what_one_does(cluster: RayCluster, tiny: str) -> None:
    assert cluster.placement_groups() == [("STRICT_PACK", 2)]
    assert completion(cluster, "split") == completion(cluster, "team/tiny")


def test_a_chat_has_the_prompt_format_of_the_file(cluster: RayCluster, tiny: str) -> None:
    chat = {"model": "split", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 12, "temperature": 0}
    raw = {"model": "team/tiny", "prompt": "[ab]:", "max_tokens": 12, "temperature": 0}
    answer, same = (
        cluster.http.post(f"/v1/{path}", json=body).json()
        for path, body in (("chat/completions", chat), ("completions", raw))
    )
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]


def test_a_client_that_leaves_ends_the_work_of_all_ranks(cluster: RayCluster, tiny: str) -> None:
    """The whole answer would take minutes."""

    def running() -> float:
        return cluster.metric("lmi_handler_running_requests", "split")

    body = {"model": "split", "prompt": "a", "max_tokens": 150_000, "ignore_eos": True, "stream": True}
    with cluster.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # once nothing refers to it, the connection is closed
        next(lines)
        until(lambda: running() == 1, "the engine has reported the request")
    until(lambda: running() == 0, "the engine runs nothing")


def test_adapters_of_the_store_are_loaded_for_requests(cluster: RayCluster, tiny: str) -> None:
    """The file allows two at a time."""
    import openai

    names = ["team/tiny", *(f"team/tiny:{name}" for name in ("red", "green", "blue"))]
    texts = [completion(cluster, name) for name in names]
    assert len(set(texts)) == 4
    assert [completion(cluster, name) for name in names] == texts
    with pytest.raises(openai.NotFoundError, match="nobody"):
        completion(cluster, "team/tiny:nobody")


def test_a_signal_while_models_are_deployed_leaves_a_joined_cluster_to_go_on(
    cluster: RayCluster, loading: Path
) -> None:
    code, output = interrupted(loading, signal.SIGTERM, RAY_ADDRESS=cluster.environment["RAY_ADDRESS"])
    assert code == 1
    [said] = [line for line in output.splitlines() if "a signal has ended this command" in line]
    assert "and not the deployment; lmi-server ray status shows" in said
    assert "Traceback" not in output
    assert cluster.replicas("unfinished")
