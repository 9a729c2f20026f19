"""What the chaos suite does to a server: kills, stops and cuts off its workers, scales and registers under load."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil
from chaos_clients import Ending, Question, ask, echo_question, plainly, post
from processes import children

from lmi_server.processes.tree import session_members

_PAUSE_S = 2.0
ATTACKED = ("echo", "own", "group", "real")
Report = Callable[[str, Ending], None]


class Attacks:
    """Does harm to the models of a server, at random. `done` are the attacks in words."""

    def __init__(self, server: int, port: int, store: Path, chance: random.Random, report: Report) -> None:
        self.done: list[str] = []
        self._server = server  # its process
        self._port = port
        self._store = store
        self._chance = chance
        self._report = report
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=180)
        self._extras = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, stopping: asyncio.Event) -> None:
        """Attack again and again. A real model takes seconds to load, so that it is hit seldom."""
        attacks = [*[self._hit] * 3, self._hit_group, self._hit_any, self._freeze, self._cut_link, self._scale]
        attacks += [self._register, self._nap, self._try_version]
        while not stopping.is_set():
            self.done.append(await self._chance.choice(attacks)())
            await asyncio.sleep(_PAUSE_S * (0.5 + self._chance.random()))

    async def settle(self) -> None:
        """Take back what scaling has changed, and what sleeps or is tried."""
        await self._take_back()
        assert (await self._http.post("/wake_up", params={"model": "echo"})).status_code in (200, 500, 503)
        await self._put_workers("echo", 2, 2)

    # --- processes ---

    async def _hit(self) -> str:
        return await self._signal(self._chance.choices(["echo", "own", "real"], [4, 4, 1])[0])

    async def _hit_group(self) -> str:
        return await self._signal("group")

    async def _hit_any(self) -> str:
        """Hit any worker but those of the model that is left in peace: also one that loads, and one that ends."""
        return self._signal_one(sorted({*children(self._server)} - {*await self._workers("calm")}), "any")

    async def _signal(self, model: str) -> str:
        return self._signal_one(await self._workers(model), model)

    def _signal_one(self, leaders: Sequence[int], of: str) -> str:
        """Kill or stop a process: a worker, or mpirun, or one of the ranks below it."""
        if not leaders:
            return f"{of} has no worker to hit"
        leader = self._chance.choice(leaders)
        pid = self._chance.choice([leader, *session_members(leader)])
        number = self._chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        self._send(pid, number)
        return f"{number.name} to {pid} of {of}"

    def _send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended and another program has its number now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if self._server in [parent.pid for parent in process.parents()]:
                process.send_signal(number)

    async def _freeze(self) -> str:
        """Stop a worker for a moment."""
        leaders = await self._workers("own")
        for pid in leaders[:1]:
            self._send(pid, signal.SIGSTOP)
            await asyncio.sleep(self._chance.random() * 3)
            self._send(pid, signal.SIGCONT)
        return f"{leaders[:1]} of own frozen for a moment"

    async def _workers(self, model: str) -> list[int]:
        answer = await self._http.get(f"/models/{model}")
        groups = answer.json()[0]["models"][0]["workerGroups"]
        return [worker["pid"] for group in groups for worker in group["workers"]]

    async def _cut_link(self) -> str:
        """Have the code of a worker shut down its link and go on."""
        question = Question("own", post("/predictions/own", b"", "x-cut: 1"), lambda _: False, "cut")
        self._report("the request that cuts the link", await ask(question, plainly, self._port, self._chance))
        return "link of own cut"

    # --- management ---

    async def _scale(self) -> str:
        least = self._chance.randrange(1, 3)
        most = least + self._chance.randrange(2)
        await self._put_workers("echo", least, most)
        return f"echo scaled to {least}-{most}"

    async def _put_workers(self, model: str, least: int, most: int) -> None:
        answer = await self._http.put(f"/models/{model}", params={"min_worker": least, "max_worker": most})
        assert answer.status_code in (200, 500, 503), answer.text  # a new worker may have been hit while it loaded

    async def _nap(self) -> str:
        """Put a model to sleep while it is asked, and wake it."""
        level, mode = self._chance.randrange(3), self._chance.choice(["abort", "wait"])
        await self._take_back()  # a model that is loaded again falls asleep after that
        slept = await self._http.post("/sleep", params={"model": "echo", "level": level, "mode": mode})
        assert slept.status_code in (200, 500, 503), slept.text  # a worker may have been hit meanwhile
        woken = await self._http.post("/wake_up", params={"model": "echo"})
        assert woken.status_code in (200, 500, 503), woken.text
        return f"echo slept at level {level}, {mode}"

    async def _try_version(self) -> str:
        """Have a new version tried for a while, on requests or on copies."""
        shadow = self._chance.choice(["true", "false"])
        rules = {"requests": 200, "duration": 2, "synchronous": "false", "max_slower": 1000}
        answer = await self._http.post("/models/echo/canary", params={"share": "50%", "shadow": shadow, **rules})
        assert answer.status_code in (202, 409, 503), answer.text
        return f"a version of echo is tried, shadow={shadow}"

    async def _take_back(self) -> None:
        answer = await self._http.post("/models/echo/canary/take_back")
        assert answer.status_code in (200, 404, 409), answer.text

    async def _register(self) -> str:
        """Register a model, ask it, and take it away while it is asked."""
        self._extras += 1
        name = f"extra{self._extras}"
        answer = await self._http.post("/models", params={"url": str(self._store / "extra"), "model_name": name})
        assert answer.status_code in (200, 500, 503), answer.text  # its worker may have been hit while it loaded
        asked = [
            asyncio.create_task(ask(echo_question(name, self._chance, False), plainly, self._port, self._chance))
            for _ in range(10)
        ]
        await asyncio.sleep(self._chance.random() / 50)
        removed = await self._http.delete(f"/models/{name}")
        assert removed.status_code in (200, 404), removed.text
        for ending in await asyncio.gather(*asked):
            self._report(name, ending)
        return f"{name} registered and unregistered"
