"""Everything at once: workers, ranks and launchers die or freeze, links are cut, models come and go, clients misbehave.

Watched from outside: every request has exactly one ending, nobody answers for a model that nobody attacks but itself,
and when it is quiet again nothing is left of all that: no slot, descriptor, process, shared memory, and little memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from chaos_attacks import ATTACKED, Attacks
from chaos_clients import WAYS, Ending, Question, ask, echo_question, own_question, plainly, real_question
from mpi_helpers import litter
from own_code_helpers import make_own
from processes import children
from server_helpers import Server, make_model, running
from waiting import wait_until

pytestmark = pytest.mark.slow

ROUND_S = 15.0
CLIENTS = 16
MAX_GROWTH = 48 << 20  # bytes of the server's memory, from the first quiet moment to the last one
LOADED_WITHIN_S = 900.0  # in a new checkout the first load of a real model compiles its kernels
MODELS = (*ATTACKED, "calm")
WORKERS = {"echo": 2, "own": 2, "group": 1, "real": 1, "calm": 1}
OWN = """
import os, socket, sys, time
from djl_python import Output

LINK = os.readlink(f"/proc/self/fd/{sys.orig_argv[sys.orig_argv.index('--link') + 1].removeprefix('fd:')}")

def cut():
    for name in os.listdir("/proc/self/fd"):
        if os.path.islink(path := f"/proc/self/fd/{name}") and os.readlink(path) == LINK:
            socket.socket(fileno=os.dup(int(name))).shutdown(socket.SHUT_RDWR)

def handle(inputs):
    if inputs.is_empty():
        return None
    if inputs.get_property("x-cut"):
        cut()
    time.sleep(float(inputs.get_property("x-sleep") or 0))
    return Output().add(inputs.get_as_bytes())
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    from tiny_models import saved_model, tiny_model

    often = {"retry_threshold": 10**6}
    echo = {"echo_delay_ms": 2, "minWorkers": 2, "maxWorkers": 2, **often}
    make_model(tmp_path / "start/echo", "handlers.echo.handler:EchoHandler", **echo)
    make_model(tmp_path / "start/calm", "handlers.echo.handler:EchoHandler", maxWorkers=1)
    make_model(tmp_path / "extra", "handlers.echo.handler:EchoHandler", maxWorkers=1)
    make_own(tmp_path / "start/own", OWN, minWorkers=2, maxWorkers=2, **often)
    ranks = {"entryPoint": "djl_python.huggingface", "rolling_batch": "scheduler", "mpi_mode": "true"}
    made = make_model(
        tmp_path / "start/group", "rank_handlers:RankHandler", tensor_parallel_degree=2, maxWorkers=1, **ranks, **often
    )
    (made / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    real = tmp_path / "start/real"
    saved_model(tiny_model("llama"), real)
    settings = {"option.entryPoint": "djl_python.huggingface", "option.rolling_batch": "scheduler", "maxWorkers": 1}
    settings |= {"option.kv_cache_memory_gb": "0.05", "option.dtype": "fp32", **often}
    (real / "serving.properties").write_text("\n".join(f"{key}={value}" for key, value in settings.items()))
    return tmp_path


@pytest.fixture
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store / "start", libraries="") as server:
        yield server


class Endings:
    """Counts how requests end; `wrong` are those that end as none may."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    def add(self, question: str, ending: Ending) -> None:
        self.counts[question.rstrip("0123456789"), ending.kind] += 1
        if not ending.is_proper:
            self.wrong.append(f"{question}: {ending.kind}: {ending.detail}")

    def add_calm(self, question: str, ending: Ending) -> None:
        """Count an ending at a model that nobody attacks: an error is wrong there."""
        self.add(question, Ending("refused", ending.detail) if ending.kind == "error" else ending)


@dataclass(frozen=True)
class Resources:
    """What a server holds when it is quiet."""

    descriptors: int
    processes: int
    shared_memory: int
    calm: tuple[int, int]
    """The worker that nobody attacks, and its descriptors."""

    @classmethod
    def of(cls, server: Server) -> Resources:
        pid = server.process.pid
        descendants = psutil.Process(pid).children(recursive=True)
        (group,) = server.http.get("/models/calm").json()[0]["models"][0]["workerGroups"]
        calm = group["workers"][0]["pid"]
        return cls(descriptors(pid), len(descendants), len(litter(pid)), (calm, descriptors(calm)))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_of(server: Server) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def is_quiet(server: Server) -> bool:
    """Return whether every model has its workers, and none holds or waits for a request."""
    time.sleep(0.3)  # each look costs time of the processor that the workers need to load
    text = server.http.get("/metrics").text
    ready = {model: gauge(text, "lmi_workers_ready", model) for model in MODELS}
    held = [gauge(text, name, model) for name in ("lmi_requests_in_flight", "lmi_queue_depth") for model in MODELS]
    return ready == WORKERS and not any(held)


def gauge(text: str, name: str, model: str) -> float | None:
    found = re.search(rf'^{name}{{model="{model}"}} (\S+)$', text, re.MULTILINE)
    return None if found is None else float(found[1])


def has_only(server: Server, resources: Resources) -> bool:
    time.sleep(0.3)
    return Resources.of(server) == resources


async def one_request(port: int, chance: random.Random, endings: Endings) -> None:
    question = next_question(chance)
    way = chance.choice(WAYS)
    ending = await ask(question, way, port, chance)
    count = endings.add_calm if question.model == "calm" else endings.add
    count(question.model if ending.is_proper else f"{question.model}, {way.__name__}, {question.shown}", ending)


def next_question(chance: random.Random) -> Question:
    model = chance.choices(MODELS, [12, 8, 6, 1, 6])[0]
    match model:
        case "own":
            return own_question(model, chance)
        case "real":
            return real_question(model, chance, stream=False)
    return echo_question(model, chance, stream=chance.random() < 0.4)


async def chaos(server: Server, store: Path, chance: random.Random, endings: Endings) -> list[str]:
    """Attack under load for a while; return the attacks once every request has ended."""
    stopping = asyncio.Event()

    async def client(seed: int) -> None:
        mine = random.Random(seed)
        while not stopping.is_set():
            await one_request(server.port, mine, endings)
            await asyncio.sleep(mine.random() / 2)

    attacks = Attacks(server.process.pid, server.port, store, random.Random(chance.random()), endings.add)
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client(chance.randrange(2**32)))
        group.create_task(attacks.run(stopping))
        await asyncio.sleep(ROUND_S)
        stopping.set()
    await attacks.settle()
    await attacks.close()
    return attacks.done


def warm_up(server: Server, store: Path, chance: random.Random) -> None:
    """Have every model answer, and one come and go, so that what is made once is there before anything is counted."""
    questions = [echo_question(model, chance, stream=False) for model in ("echo", "group", "calm")]
    questions += [own_question("own", chance), real_question("real", chance, stream=False)]
    for question in questions:
        assert asyncio.run(ask(question, plainly, server.port, chance)).kind == "answer"
    parameters = {"url": str(store / "extra"), "model_name": "first"}
    assert server.http.post("/models", params=parameters).status_code == 200
    assert server.http.delete("/models/first").status_code == 200
    wait_until(lambda: len(children(server.process.pid)) == sum(WORKERS.values()), "it is gone")


def test_chaos(server: Server, store: Path, seconds: float, seed: int) -> None:
    print(f"--chaos-seed={seed}")
    chance = random.Random(seed)
    endings = Endings()
    wait_until(lambda: is_quiet(server), "all models are loaded", LOADED_WITHIN_S)
    warm_up(server, store, chance)
    before, memory = Resources.of(server), []
    for number in range(max(2, int(seconds / ROUND_S))):
        done = asyncio.run(chaos(server, store, chance, endings))
        print(f"round {number}: {', '.join(done)}")
        assert not endings.wrong, "\n".join(endings.wrong[:20])
        wait_until(lambda: is_quiet(server), f"the server is quiet after round {number}", 300)
        wait_until(lambda: has_only(server, before), f"{before} again after round {number}", 300)
        memory.append(memory_of(server))
    print(f"{dict(endings.counts)}, memory in MiB: {[size >> 20 for size in memory]}")
    assert max(memory) - memory[0] < MAX_GROWTH, memory
    served = {model for model, kind in endings.counts if kind == "answer"}
    assert served >= set(MODELS), endings.counts
    assert server.stop() == 0
    assert not litter(server.process.pid)
    assert not [line for line in server.lines if "Traceback" in line and "supervisor.log" not in line]
