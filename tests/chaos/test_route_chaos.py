"""A router whose servers are killed, come back, fall ill and answer nonsense, under clients that misbehave.

Watched from outside: every request has exactly one ending, of a documented kind, and when it is quiet again the router
holds no request and no connection of one, and serves as before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from chaos_clients import WAYS, Question, ask, post
from route_helpers import EVENTS, USAGE, FakeServer, Router, fakes, routing
from waiting import wait_until

pytestmark = pytest.mark.slow

CLIENTS, REQUESTS, SERVERS, ATTACKS = 24, 30, 3, 60
WHOLE = b"".join((*EVENTS, USAGE))
KINDS = {
    "echo": 8, "stream": 8, "half": 2, "short": 1, "die": 2, "garbage": 1, "both": 1, "two": 1, "until_close": 2,
    "hints": 2, "busy": 1, "upgrade": 1, "many_headers": 1, "long_head": 1, "trailers": 1,
}  # fmt: skip
ERRORS = frozenset({429, 502, 503})


def question(chance: random.Random) -> Question:
    """Return a request that says how the server answers it."""
    do = chance.choices(list(KINDS), list(KINDS.values()))[0]
    body = {"model": "model", "messages": [{"role": "user", "content": str(chance.random())}], "do": do}
    return Question(
        do, post("/v1/chat/completions", json.dumps(body).encode()), lambda answer: is_right(do, answer), do, ERRORS
    )


def is_right(do: str, answer: bytes) -> bool:
    """Return whether this is the answer, or of a stream the beginning with an error as its only end."""
    if do not in ("stream", "half", "trailers"):
        return isinstance(json.loads(answer), dict)
    if do == "stream" and answer == WHOLE:
        return True
    events = [event for event in answer.split(b"\n\n") if event]
    begun, last = events[:-1], json.loads(events[-1].removeprefix(b"data: "))
    return WHOLE.startswith(b"".join(event + b"\n\n" for event in begun)) and "error" in last


async def attack(servers: Sequence[FakeServer], chance: random.Random) -> None:
    """Kill servers, let them be ill, and bring them back."""
    for _ in range(ATTACKS):
        server = chance.choice(servers)
        if chance.random() < 0.3:
            server.health = chance.choice([200, 500])
        else:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(chance.random() / 5)
            await asyncio.to_thread(server.start)
        await asyncio.sleep(chance.random() / 20)
    for server in servers:
        server.health = 200


async def chaos(router: Router, servers: Sequence[FakeServer], chance: random.Random) -> tuple[Counter[str], list[str]]:
    """Return how requests ended, and which of them as none may."""
    port, counts, wrong = int(router.url.rpartition(":")[2]), Counter[str](), list[str]()

    async def client(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(REQUESTS):
            asked, way = question(mine), mine.choice(WAYS)
            ending = await ask(asked, way, port, mine)
            counts[ending.kind] += 1
            if not ending.is_proper:
                wrong.append(f"{asked.shown}, {way.__name__}: {ending.kind}: {ending.detail}")

    async with asyncio.TaskGroup() as group:
        group.create_task(attack(servers, chance))
        for _ in range(CLIENTS):
            group.create_task(client(chance.randrange(2**32)))
    return counts, wrong


def held(router: Router) -> float:
    """Return how many requests wait or are in flight."""
    lines = router.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(("lmi_requests_in_flight{", "lmi_queue_depth{"))]
    assert len(found) == 2
    return sum(float(line.split()[-1]) for line in found)


def test_every_request_through_a_router_ends_once_whatever_its_servers_do() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # shown if it fails
    with fakes(SERVERS) as servers, routing(*(server.url for server in servers)) as router:
        wait_until(lambda: all(each["healthy"] for each in router.servers().values()), "all servers serve")
        descriptors = len(os.listdir(f"/proc/{router.process.pid}/fd"))
        counts, wrong = asyncio.run(chaos(router, servers, random.Random(seed)))
        assert not wrong, wrong[:5]
        assert counts.total() == CLIENTS * REQUESTS
        assert counts["answer"] > counts.total() / 4
        wait_until(lambda: not held(router), "no request is held")
        wait_until(lambda: all(each["healthy"] for each in router.servers().values()), "all servers serve again")
        assert [router.chat().status_code for _ in range(20)] == [200] * 20
        settled = descriptors + 4  # a few idle connections
        wait_until(lambda: len(os.listdir(f"/proc/{router.process.pid}/fd")) <= settled, "connections are closed")
