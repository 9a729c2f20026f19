"""A cluster of Ray on this machine, and clients that ask without a pause while it changes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from forked_servers import run_python
from model_directories import write_properties
from paths import MODEL_CODE, ROOT, TESTS
from waiting import wait_until

os.environ |= {
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray makes a token in the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that answers late on a busy machine is not dead; one that refuses connections is, after a few seconds.
    "RAY_health_check_timeout_ms": "120000",
    "RAY_health_check_period_ms": "1000",
    "RAY_worker_register_timeout_seconds": "600",  # by itself a minute, in which a busy machine starts none
    "RAY_worker_niceness": "0",  # with Ray's 15, replicas hardly run beside anything else that computes
    "RAY_prestart_worker_first_driver": "0",  # processes that wait for work, which never comes
    # What Ray's processes do all the time, whether something happens or not.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "0",
    "RAY_task_events_report_interval_ms": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
}
COMMAND = str(MODEL_CODE / "forked_ray_command.py")
LIMIT_S = 600.0  # for all that Ray does: it starts processes that take seconds each, on a machine that may be busy


class RayCluster:
    """Three nodes, two of them with a front end. `http` talks to the first of `front_ends`, which no test removes."""

    def __init__(self) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        self._ray, self._serve = ray, serve
        devices = {"num_gpus": 2, "resources": {"neuron_cores": 2}}
        self._forks = [_Forks() for _ in range(3)]
        node = {"num_cpus": 8, "include_log_monitor": False, "setup_worker_path": _Forks.script}
        head, *others = ({**node, "worker_path": forks.path} for forks in self._forks)
        head |= {**devices, "include_dashboard": False, "no_monitor": True}
        self._cluster = Cluster()
        try:
            self._cluster.add_node(**head)
            self._others = [self._cluster.add_node(**other, wait=False) for other in others]
        except Exception:  # of the class that Ray has for all errors of a start
            self._end_nodes()
            raise
        self._cluster.wait_for_nodes(LIMIT_S)
        ray.init(address=self._cluster.address, namespace="lmi-server", log_to_driver=False)
        serve.start(proxy_location="Disabled")
        self.environment = os.environ | {"RAY_ADDRESS": self._cluster.address, "PYTHONPATH": str(ROOT)}
        self.http = httpx.Client(timeout=LIMIT_S)

    def deploy(self, *models: Any) -> None:
        from lmi_server.ray.application import IngressSettings, application
        from lmi_server.ray.deployments.deployment import APPLICATION

        settings = IngressSettings(host="127.0.0.1", port=0, count=2, drain_timeout_s=60)
        self._serve.run(application(models, settings), name=APPLICATION, route_prefix=None)
        self.front_ends()

    def front_ends(self) -> tuple[FrontEnd, FrontEnd]:
        """Return the front ends of two nodes; the second one is not on the head. `http` talks to the first one now."""
        handle = self._serve.get_deployment_handle("front-end", "lmi-server")
        found: dict[str, FrontEnd] = {}

        def ask() -> bool:
            with contextlib.suppress(self._ray.exceptions.RayError):  # one that has just ended
                told = handle.remote().result(timeout_s=LIMIT_S)
                found[told["node"]] = FrontEnd(f"http://127.0.0.1:{told['port']}", told["process"], told["node"])
            return len(found) == 2

        wait_until(ask, "two front ends answer", LIMIT_S)
        first, second = sorted(found.values(), key=lambda each: each.node != self._cluster.head_node.node_id)
        self.http.base_url = first.url
        return first, second

    def deploy_by_command(self, *models: Path) -> str:
        """Deploy what `lmi-server ray deploy` makes of `models`; return what it printed."""
        arguments = [COMMAND, "deploy", *map(str, models), "--host", "127.0.0.1", "--port", "0"]
        ran = run_python(arguments, self.environment, "ray")
        assert ran.returncode == 0, ran.stderr
        self.http.base_url = ran.stdout.split()[-1]
        return ran.stdout

    def placement_groups(self) -> list[tuple[str, int]]:
        """Return strategy and number of bundles of each placement group that has its places."""
        groups = self._ray.util.placement_group_table().values()
        return [(group["strategy"], len(group["bundles"])) for group in groups if group["state"] == "CREATED"]

    def ready(self, model: str) -> int:
        """Return the number of replicas to which the front end is connected."""
        try:
            answer = self.http.get(f"/models/{model}")
        except httpx.ConnectError:  # the front end is being started
            return 0
        groups = answer.json()[0]["models"][0]["workerGroups"] if answer.status_code == 200 else []
        return sum(worker["status"] == "READY" for group in groups for worker in group["workers"])

    def until_ready(self, model: str, count: int) -> None:
        wait_until(lambda: self.ready(model) == count, f"{count} replicas of {model} are ready", LIMIT_S)

    def until_described(self, model: str) -> None:
        """Wait until the front end takes requests for a model, which may have no replica."""
        wait_until(
            lambda: self.http.get(f"/models/{model}").json()[0]["models"][0]["status"] == "Healthy",
            f"{model} is there",
            LIMIT_S,
        )

    def metric(self, name: str, model: str) -> float:
        """Return a value of `/metrics`, nan if there is none yet."""
        text = self.http.get("/metrics").text
        found = re.search(rf'^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)$', text, re.MULTILINE | re.IGNORECASE)
        return float("nan") if found is None else float(found[1])

    def replicas(self, model: str) -> list[str]:
        """Return the names of the actors of a model's replicas."""
        actors = self._ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["name"].startswith(f"SERVE_REPLICA::lmi-server#{model}#")]

    def kill(self, actor: str, restarts: bool = False) -> None:
        self._ray.kill(self._ray.get_actor(actor, namespace="serve"), no_restart=not restarts)

    def variables(self, model: str) -> dict[str, str]:
        """Return the environment of the process of a model's replica."""
        handle = self._serve.get_deployment_handle(model, "lmi-server")
        environment = Path(f"/proc/{handle.process_id.remote().result()}/environ").read_bytes()
        return dict(entry.split("=", 1) for entry in environment.decode().split("\0") if entry)

    def remove_node(self, node_id: str) -> None:
        """Kill a node that is not the head, with every process on it."""
        [node] = [node for node in self._others if node.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        self.http.close()
        self._serve.shutdown()
        self._ray.shutdown()
        self._end_nodes()

    def _end_nodes(self) -> None:
        self._cluster.shutdown()
        for forks in self._forks:
            forks.end()


def started_cluster() -> RayCluster:
    """Start a cluster. Ray gives a node up after half a minute, which no setting changes: then start it once more."""
    try:
        return RayCluster()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
    return RayCluster()


class _Forks:
    """forked_ray.py: the workers of a node are forks of it. Ray starts `python SCRIPT PATH ARGUMENTS` for each."""

    script = str(MODEL_CODE / "fork_requests.py")

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ray-")
        self.path = str(Path(self._directory.name) / "forks")
        paths = os.pathsep.join([str(MODEL_CODE), str(TESTS / "support"), str(ROOT)])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.path)
            listener.listen()
            given = listener.fileno()
            command = [sys.executable, str(MODEL_CODE / "forked_ray.py"), str(given), self.path]
            self._process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, pass_fds=[given])

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)
        self._directory.cleanup()


class FrontEnd(NamedTuple):
    url: str
    process: int
    node: str


class Load:
    """Clients that ask one after the other. `endings` counts how whole answers ended, `streams` how streams did."""

    def __init__(self, url: str, model: str, clients: int, tokens: int) -> None:
        self.endings: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self._url, self._model, self._tokens = url, model, tokens
        self._stopping = threading.Event()
        kinds = [self._ask, self._stream]
        self._threads = [threading.Thread(target=self._run, args=(kinds[number % 2],)) for number in range(clients)]

    def _run(self, ask: Any) -> None:
        with httpx.Client(base_url=self._url, timeout=LIMIT_S) as http:
            while not self._stopping.is_set():
                try:
                    ask(http)
                except httpx.HTTPError as error:
                    self.endings[type(error).__name__] += 1
                    return  # the front end is gone

    def _body(self, stream: bool) -> dict[str, Any]:
        chat = {"model": self._model, "messages": [{"role": "user", "content": "a b c"}]}
        return chat | {"max_tokens": self._tokens, "stream": stream}

    def _ask(self, http: httpx.Client) -> None:
        self.endings[str(http.post("/v1/chat/completions", json=self._body(False)).status_code)] += 1

    def _stream(self, http: httpx.Client) -> None:
        with http.stream("POST", "/v1/chat/completions", json=self._body(True)) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        self.streams[_ending(answer.status_code, events)] += 1

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()


def _ending(status: int, events: Sequence[str]) -> str:
    """Return how a stream ended: whole, with an error, or cut off, which must not be."""
    if status != 200:
        return str(status)
    if events[-1] == "[DONE]" and "error" not in json.loads(events[-2]):
        return "whole"
    reported = [event for event in events if event != "[DONE]" and "error" in json.loads(event)]
    return "error" if reported else "cut off"


@contextlib.contextmanager
def loaded(
    cluster: RayCluster, model: str, clients: int = 4, tokens: int = 10, url: str | None = None
) -> Iterator[Load]:
    """Ask a model while the block runs, the head's front end if no `url` is given; every request has ended after it."""
    load = Load(url or str(cluster.http.base_url), model, clients, tokens)
    load.start()
    try:
        yield load
    finally:
        load.stop()


def tiny_models_of_a_cluster(directory: Path) -> tuple[Path, Path]:
    """Make an LLMConfig with a store of adapters, and a file of RayLLM that splits the same weights over two ranks."""
    from adapter_helpers import save_adapter
    from tiny_models import FAMILIES, random_model, saved_model

    config = FAMILIES["llama"]()
    config.update({"vocab_size": 260, "max_position_embeddings": 200_000})  # two ranks share the vocabulary
    model = random_model(config)
    saved_model(model, directory / "weights")
    for seed, name in enumerate(("red", "green", "blue")):
        save_adapter(model, directory / "loras" / name, seed)
    tiny, split = directory / "tiny.yaml", directory / "split.yaml"
    tiny.write_text(_TINY)
    split.write_text(_SPLIT)
    return tiny, split


_TINY = """\
model_loading_config: {model_id: team/tiny, model_source: weights}
engine_kwargs: {dtype: float32, max_model_len: 200}
accelerator_config: {kind: cpu}
lora_config: {dynamic_lora_loading_path: loras, max_num_adapters_per_replica: 2}
runtime_env: {env_vars: {OMP_NUM_THREADS: "1"}}
"""

_SPLIT = """\
deployment_config:
  autoscaling_config: {min_replicas: 1, max_replicas: 1, target_num_ongoing_requests_per_replica: 4}
  max_concurrent_queries: 8
engine_config:
  model_id: split
  hf_model_id: weights
  engine_kwargs: {dtype: float32, kv_cache_memory_gb: 0.1}
  generation:
    prompt_format:
      system: "<{instruction}>"
      user: "[{instruction}]"
      assistant: "{instruction}"
      trailing_assistant: ":"
      default_system_message: ""
  runtime_env: {env_vars: {OMP_NUM_THREADS: "1"}}
scaling_config:
  num_workers: 2
  num_cpus_per_worker: 1
  num_gpus_per_worker: 0
  placement_strategy: STRICT_PACK
"""


def echo_model(directory: Path, delay_ms: int, **keys: Any) -> Path:
    """Make a model directory that answers a token every `delay_ms`."""
    return write_properties(directory, entryPoint="djl_python.echo", echo_delay_ms=delay_ms, **keys)
