"""Simulates a cluster of a thousand replicas on a virtual clock: real routing code, and Ray's autoscaling.

    python -m benchmarks.ray_simulation [--replicas 1000] [--minutes 10] [--front-ends 4]

Needs the extra `ray` and no cluster. Requests are given to a `Dispatcher` of `lmi_server.serving` (sessions, prefixes,
the cap of the queue), one per front end, whose workers are simulated. How many replicas there are decides
`lmi_server.ray.autoscaling.desired_replicas` under Ray's own factors and delays. Times in the table with "us" or "ms"
are processor time of the real code, all others are virtual.

The load is generated, in the shape of Azure's LLM inference trace of 2023 (conversations), from what is published of it
(Patel et al., "Splitwise", 2024): prompts have a median of 1,020 tokens and a mean of 1,155, outputs 129 and 211, both
taken as log-normal. The rate goes with --replicas; it rises and falls between 40 and 100 % of what they can do, as a
day does, with bursts of a minute. Of conversations the trace says nothing: here they have a geometric number of turns,
3.5 on average, with 20 s between two, and begin with one of twenty system prompts of 512 tokens.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
import time
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from benchmarks.figures import parser_of, show
from lmi_server.contract.errors import QueueFullError
from lmi_server.contract.link import WorkerLink, frame, from_worker_decoder
from lmi_server.contract.protocol import Input, Load, Message, Reply, Stats, Submit
from lmi_server.ray.autoscaling import ONGOING, desired_replicas
from lmi_server.ray.deployments.deployment import ONGOING_SHARE
from lmi_server.ray.messages import ClusterModels, ModelReplicas, line
from lmi_server.serving.dispatch.dispatcher import Dispatcher
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.launch.remote import RemotePlace
from lmi_server.supervisor.launch.worker_launch import WorkerLaunch
from lmi_server.supervisor.worker_process import WorkerProcess
from lmi_server.supervisor.worker_requests import WorkerRequests

MAX_ONGOING = 16  # requests of a replica
START_S = 60.0  # from Ray's decision to a replica that serves: the weights are on the node
PREFILL_PER_S, TOKEN_S = 8000.0, 0.03  # tokens of a prompt per second; seconds per output token
TURNS, THINKING_S = 3.5, 20.0
SYSTEM_PROMPTS, BYTES_PER_TOKEN = 20, 4
REPORT_S, LOOK_BACK_S = 1.0, 30.0
NOISE = random.Random(1).randbytes(1 << 20).hex().encode()


class Replica:
    """One replica: what it has cached, and when its requests end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: Counter[int] = Counter()  # of each front end
        self.reports: deque[int] = deque(maxlen=round(LOOK_BACK_S / REPORT_S))
        self.leaving = False

    @property
    def ongoing(self) -> int:
        return sum(self.held.values())


class Turn(msgspec.Struct):
    """A request: the prompt, of which `known` tokens were in the turn before, on the replica `last`."""

    conversation: int
    body: bytes
    prompt: int
    output: int
    known: int
    last: Replica | None
    arrived: float


class Worker:
    """A replica as one front end sees it: the dispatcher's own books, and a link that starts the simulated work."""

    def __init__(self, front_end: FrontEndConnection, replica: Replica) -> None:
        self.replica = replica
        self.name = str(replica.number)
        self._front_end = front_end
        link = cast(WorkerLink, SimpleNamespace(send=self._send))
        self.requests = WorkerRequests(link, cast(WorkerLaunch, None))
        self.controls = SimpleNamespace(settle=lambda item: False)

    def _send(self, message: Message) -> None:
        if isinstance(message, Submit):
            self._front_end.started(self, message.id)


class FrontEndConnection:
    """One front end with its own dispatcher."""

    def __init__(self, number: int, cluster: Cluster, most: int) -> None:
        self.number = number
        self.cluster = cluster
        self.roster = WorkerRoster()
        self.dispatcher = Dispatcher(_settings(most), self.roster, lambda: None)
        self.workers: dict[Replica, Worker] = {}
        self._turns: dict[str, Turn] = {}

    def submit(self, turn: Turn, name: str) -> None:
        self._turns[name] = turn
        self.dispatcher.submit(Input("", {}, [("data", turn.body)], name), lambda: None)

    def started(self, worker: Worker, number: int) -> None:
        request = worker.requests.in_flight[number].request
        self.cluster.started(self, worker, number, self._turns.pop(request.request_id))

    def ended(self, worker: Worker, number: int) -> None:
        self.dispatcher.on_items(cast(WorkerProcess, worker), [Reply(number, 200, [], b"")])

    def add(self, replica: Replica) -> None:
        worker = self.workers[replica] = Worker(self, replica)
        self.roster.ready.append(cast(WorkerProcess, worker))
        self.dispatcher.resume()

    def leave(self, replica: Replica) -> None:
        worker = cast(WorkerProcess, self.workers.pop(replica))
        self.roster.leave(worker)
        self.dispatcher.router.forget(worker)


class Cluster:
    """The events, in order of virtual time, and what is counted."""

    def __init__(self, replicas: int, minutes: float, front_ends: int) -> None:
        self.most = replicas
        self.ends_at = minutes * 60
        self.now = 0.0
        self.chance = random.Random(7)
        self.front_ends = [FrontEndConnection(number, self, MAX_ONGOING) for number in range(front_ends)]
        self.replicas: list[Replica] = []
        self.target = max(1, round(0.45 * replicas))
        self.state: dict[str, Any] = {}
        self.target_ongoing = max(1, round(MAX_ONGOING * ONGOING_SHARE))
        self.config = AutoscalingConfig(
            min_replicas=1,
            max_replicas=replicas,
            target_ongoing_requests=self.target_ongoing,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=30,
            downscale_delay_s=600,
        )
        self.policy = autoscaling_policy._apply_autoscaling_config(desired_replicas)
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._conversations = itertools.count()
        # What is measured.
        self.waits: list[float] = []
        self.imbalance: list[float] = []
        self.sizes: list[tuple[int, int]] = []  # replicas wanted and running
        self.reusable = self.reused = self.refused = self.served = 0
        self.routing_s = self.policy_s = 0.0
        self.decisions = 0
        for _ in range(self.target):
            self._begin_replica()

    # --- time ---

    def at(self, when: float, action: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def run(self) -> None:
        self.at(0.0, self._arrival)
        self.at(REPORT_S, self._report)
        while self._events and self._events[0][0] < self.ends_at:
            self.now, _, action = heapq.heappop(self._events)
            action()

    # --- load ---

    def rate(self) -> float:
        """Return conversations per second: a day in the time of the run, with bursts of a minute."""
        service_s = 1155 / PREFILL_PER_S + 211 * TOKEN_S
        most = self.most * self.target_ongoing / service_s / TURNS
        day = 0.7 - 0.3 * math.cos(2 * math.pi * self.now / self.ends_at)
        return most * day * (1.25 if self.now % 180 < 60 else 0.9)

    def _arrival(self) -> None:
        self.at(self.now + self.chance.expovariate(self.rate()), self._arrival)
        self._turn(next(self._conversations), 0, None)

    def _turn(self, conversation: int, known: int, last: Replica | None) -> None:
        system = conversation % SYSTEM_PROMPTS
        new = round(self.chance.lognormvariate(math.log(1020), 0.498))
        prompt = max(new, known + new // 4)
        length = min(prompt, 8192) * BYTES_PER_TOKEN
        shared, own = system * 4096, (conversation * 911) % (len(NOISE) - 40_000)
        body = NOISE[shared : shared + 2048] + b"%d" % conversation + NOISE[own : own + max(0, length - 2048)]
        output = min(2048, max(1, round(self.chance.lognormvariate(math.log(129), 0.992))))
        turn = Turn(conversation, body, prompt, output, known, last, self.now)
        front_end = self.chance.choice(self.front_ends)
        began = time.process_time()
        try:
            front_end.submit(turn, f"{conversation}/{prompt}/{self.now}")
        except QueueFullError:
            self.refused += 1
        self.routing_s += time.process_time() - began

    def started(self, front_end: FrontEndConnection, worker: Worker, number: int, turn: Turn) -> None:
        replica = worker.replica
        replica.held[front_end.number] += 1
        self.waits.append(self.now - turn.arrived)
        cached = 0
        if turn.last is not None:
            self.reusable += turn.known
            cached = turn.known if turn.last is replica else 0
            self.reused += cached
        busy = 1 + replica.ongoing / MAX_ONGOING  # a fuller batch decodes each of its tokens more slowly
        service_s = (turn.prompt - cached) / PREFILL_PER_S + turn.output * TOKEN_S * busy / 1.4
        self.at(self.now + service_s, lambda: self._end(front_end, worker, number, turn))

    def _end(self, front_end: FrontEndConnection, worker: Worker, number: int, turn: Turn) -> None:
        worker.replica.held[front_end.number] -= 1
        self.served += 1
        began = time.process_time()
        front_end.ended(worker, number)
        self.routing_s += time.process_time() - began
        if self.chance.random() < 1 - 1 / TURNS:
            known = turn.prompt + turn.output
            pause_s = self.chance.expovariate(1 / THINKING_S)
            self.at(self.now + pause_s, lambda: self._turn(turn.conversation, known, worker.replica))

    # --- replicas ---

    def _begin_replica(self) -> None:
        replica = Replica(next(self._numbers))
        self.replicas.append(replica)
        for front_end in self.front_ends:
            front_end.add(replica)

    def _report(self) -> None:
        self.at(self.now + REPORT_S, self._report)
        held = [replica.ongoing for replica in self.replicas]
        for replica, ongoing in zip(self.replicas, held, strict=True):
            replica.reports.append(ongoing)
        mean = statistics.fmean(held)
        if mean:
            self.imbalance.append(sorted(held)[round(0.99 * (len(held) - 1))] / mean)
        self._scale()

    def _scale(self) -> None:
        began = time.process_time()
        reported = {replica.number: statistics.fmean(replica.reports) for replica in self.replicas}
        context = AutoscalingContext(
            deployment_id=None,
            deployment_name="model",
            app_name=None,
            running_replicas=[],
            total_num_requests=sum(reported.values()),
            total_queued_requests=0,
            raw_metrics=None,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=self.most,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            current_num_replicas=len(self.replicas),
            target_num_replicas=self.target,
            aggregated_metrics={ONGOING: reported},
            policy_state=self.state,
            config=self.config,
        )
        wanted, self.state = self.policy(context)
        self.policy_s += time.process_time() - began
        self.decisions += 1
        wanted = max(1, min(self.most, wanted))
        needed = min(self.most, math.ceil(sum(replica.ongoing for replica in self.replicas) / self.target_ongoing))
        self.sizes.append((needed, len(self.replicas)))
        for _ in range(wanted - self.target):
            self.at(self.now + START_S, self._begin_replica)
        for _ in range(self.target - wanted):
            self._end_replica()
        self.target = wanted

    def _end_replica(self) -> None:
        replica = min(self.replicas, key=lambda each: each.ongoing)
        self.replicas.remove(replica)
        for front_end in self.front_ends:
            front_end.leave(replica)


def _settings(most: int) -> PoolSettings:
    load = Load(model_name="model", model_dir="", handler="", options={}, served_names=[])
    return PoolSettings(
        load=load,
        min_workers=1,
        max_workers=1,
        max_in_flight=most,
        max_batch_delay_s=0.0,
        job_queue_size=1000,
        max_queue_delay_s=None,
        model_loading_timeout_s=60.0,
        predict_timeout_s=60.0,
        max_idle_s=60.0,
        parallel_loading=True,
        retry_threshold=10,
        quarantine_s=0.0,
        prefix_affinity=True,
    )


def lag_s(sizes: list[tuple[int, int]]) -> float:
    """Return the longest time in a row in which fewer replicas ran than the requests needed."""
    longest = current = 0
    for needed, running in sizes:
        current = current + 1 if running < needed else 0
        longest = max(longest, current)
    return longest * REPORT_S


def table_sizes(replicas: int) -> tuple[int, float]:
    """Return the bytes of the list of replicas that a front end gets, and the milliseconds that reading it takes."""
    places = {f"{number:08x}": RemotePlace(host="10.0.0.1", port=40000, token="f" * 64) for number in range(replicas)}
    told = line(ClusterModels([ModelReplicas(name="model", min_replicas=1, max_replicas=replicas, places=places)]))
    began = time.process_time()
    for _ in range(20):
        msgspec.json.decode(told, type=ClusterModels)
    return len(told), (time.process_time() - began) / 20 * 1000


def reports_ms(replicas: int) -> float:
    """Return the milliseconds that a front end takes to read one report of each replica; there is one per second."""
    gauges = {f"gauge_{number}": float(number) for number in range(12)}
    _, report = frame(Stats(gauges, list(range(MAX_ONGOING // 2))))
    began = time.process_time()
    for _ in range(replicas):
        from_worker_decoder.decode(report)
    return (time.process_time() - began) * 1000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--front-ends", type=int, default=4)
    arguments = parser.parse_args()
    cluster = Cluster(arguments.replicas, arguments.minutes, arguments.front_ends)
    with patch.object(autoscaling_policy, "time", SimpleNamespace(time=lambda: cluster.now)):
        cluster.run()
    size, read_ms = table_sizes(arguments.replicas)
    waits = sorted(cluster.waits)
    blocks = sum(len(front_end.dispatcher.router._affinity._prefixes._workers) for front_end in cluster.front_ends)  # type: ignore[union-attr]
    rows = {
        "requests served": f"{cluster.served:,}",
        "refused by the cap of the queue (503)": f"{cluster.refused:,}",
        "replicas, fewest and most": f"{min(n for _, n in cluster.sizes):,} to {max(n for _, n in cluster.sizes):,}",
        "routing, us of processor time per request": f"{cluster.routing_s / max(1, len(waits)) * 1e6:,.0f}",
        "list of replicas, KB per change": f"{size / 1000:,.0f}",
        "reading the list, ms": f"{read_ms:.1f}",
        "reading one report of each replica, ms per second": f"{reports_ms(arguments.replicas):.1f}",
        "prefixes known to a front end": f"{blocks / len(cluster.front_ends):,.0f}",
        "scaling decision, ms": f"{cluster.policy_s / max(1, cluster.decisions) * 1000:.2f}",
        "tokens of past turns that were cached": f"{cluster.reused / max(1, cluster.reusable):.1%}",
        "requests of the 99th replica of 100, over the mean": f"{statistics.median(cluster.imbalance):.2f}",
        "wait for a replica, s, median and 99 %": f"{waits[len(waits) // 2]:.2f}, {waits[len(waits) * 99 // 100]:.2f}",
        "longest time with too few replicas, s": f"{lag_s(cluster.sizes):,.0f}",
    }
    named = f"{arguments.replicas:,} replicas, {arguments.front_ends} front ends, {arguments.minutes:g} virtual minutes"
    show(("measured", named), rows.items(), "A simulated cluster", 110)


if __name__ == "__main__":
    main()
