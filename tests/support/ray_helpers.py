"""A cluster of Ray on this machine, and clients that ask without a pause while it changes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from paths import ROOT
from waiting import wait_until

os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise Ray makes a token in the home directory
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


class RayCluster:
    """Two nodes; `node` is the one that is not the head. `deploy` serves models on a port that stays the same."""

    def __init__(self) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        self._ray, self._serve = ray, serve
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 2, "include_dashboard": False}
        )
        self.node = self._cluster.add_node(num_cpus=8)
        ray.init(address=self._cluster.address, namespace="lmi-server", log_to_driver=False)
        serve.start(proxy_location="Disabled")
        self.environment = os.environ | {"RAY_ADDRESS": self._cluster.address, "PYTHONPATH": str(ROOT)}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def deploy(self, *models: Any) -> None:
        from lmi_server.ray.application import IngressSettings, application
        from lmi_server.ray.deployment import APPLICATION

        settings = IngressSettings(host="127.0.0.1", port=self.port, drain_timeout_s=60)
        self._serve.run(application(models, settings), name=APPLICATION, route_prefix=None)

    def ready(self, model: str) -> int:
        """Return the number of replicas to which the front end is connected."""
        answer = self.http.get(f"/models/{model}")
        groups = answer.json()[0]["models"][0]["workerGroups"] if answer.status_code == 200 else []
        return sum(worker["status"] == "READY" for group in groups for worker in group["workers"])

    def until_ready(self, model: str, count: int) -> None:
        wait_until(lambda: self.ready(model) == count, f"{count} replicas of {model} are ready")

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

    def remove_node(self) -> None:
        self._cluster.remove_node(self.node, allow_graceful=False)

    def stop(self) -> None:
        self.http.close()
        self._serve.shutdown()
        self._ray.shutdown()
        self._cluster.shutdown()


class Load:
    """Clients that ask one after the other. `endings` counts how whole answers ended, `streams` how streams did."""

    def __init__(self, cluster: RayCluster, model: str, clients: int, tokens: int) -> None:
        self.endings: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self._cluster, self._model, self._tokens = cluster, model, tokens
        self._stopping = threading.Event()
        kinds = [self._ask, self._stream]
        self._threads = [threading.Thread(target=self._run, args=(kinds[number % 2],)) for number in range(clients)]

    def _run(self, ask: Any) -> None:
        with httpx.Client(base_url=self._cluster.http.base_url, timeout=60) as http:
            while not self._stopping.is_set():
                try:
                    ask(http)
                except httpx.HTTPError as error:
                    self.endings[type(error).__name__] += 1

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
            thread.join(120)

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
def loaded(cluster: RayCluster, model: str, clients: int = 4, tokens: int = 40) -> Iterator[Load]:
    """Ask a model while the block runs; every request has ended after it."""
    load = Load(cluster, model, clients, tokens)
    load.start()
    try:
        yield load
    finally:
        load.stop()


def echo_model(directory: Path, delay_ms: int, **keys: Any) -> Path:
    """Make a model directory that answers a token every `delay_ms`."""
    directory.mkdir(parents=True)
    lines = ["option.entryPoint=djl_python.echo", f"option.echo_delay_ms={delay_ms}"]
    lines += [f"{key}={value}" for key, value in keys.items()]
    (directory / "serving.properties").write_text("\n".join(lines))
    return directory
