"""ModelReplicas and the front end before them, as the actors of a cluster start them, without a cluster."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import msgspec
from paths import ROOT
from process_log import LIMIT_S, ProcessLog
from waiting import wait_until

from lmi_server.ray.messages import (
    ClusterModels,
    Drain,
    FromFrontEnd,
    Listening,
    ModelDescription,
    ModelReplicas,
    Ongoing,
    ReplicaFailed,
    ReplicaReady,
    Start,
    line,
)

Line = ReplicaReady | ReplicaFailed | Ongoing


class Process:
    """A process that ends with the pipe to it."""

    def __init__(self, *arguments: str) -> None:
        pipe = subprocess.PIPE
        command, variables = [sys.executable, "-m", *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=variables)
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self._pipe = self.process.stdin
        self.log = ProcessLog(io.TextIOWrapper(self.process.stderr))

    def tell(self, message: msgspec.Struct) -> None:
        self._pipe.write(line(message))
        self._pipe.flush()

    def leave(self) -> int:
        """Close the pipe, as the end of the actor does, and wait for the end of the process."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        return self.process.wait(LIMIT_S)

    def end(self) -> None:
        """End the process, and whatever reads from it."""
        self.leave()
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


class ReplicaProcess(Process):
    """A replica of the model in `directory`; `heard` returns once its model is loaded."""

    def __init__(self, directory: Path, drain_timeout_s: float = 60.0) -> None:
        super().__init__("lmi_server.ray.replica_process")
        self.tell(Start(url=str(directory), name="model", host="127.0.0.1", drain_timeout_s=drain_timeout_s))

    def heard(self) -> Line:
        """Return the next message to the actor."""
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=Line)

    def drain(self) -> None:
        self.tell(Drain())


class FrontEndProcess(Process):
    """A front end that is told which replicas there are."""

    def __init__(self) -> None:
        super().__init__("frontend.ray.ingress", "127.0.0.1", "0", "60")
        self.port = int(self.log.wait_for(r"listening on http://127\.0\.0\.1:(\d+)")[1])
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LIMIT_S)
        assert self.heard() == Listening()

    def knows(
        self,
        model: ModelDescription | None,
        replicas: Mapping[str, ReplicaReady],
        aliases: tuple[str, ...] = (),
        *,
        second: bool = False,
    ) -> None:
        """Tell it that the model has these replicas, and no others; with `second`, that another model has them too."""
        places = {name: serving.place for name, serving in replicas.items()}
        told = ModelReplicas(name="model", aliases=aliases, min_replicas=1, max_replicas=3, model=model, places=places)
        more = [msgspec.structs.replace(told, name="second")] if second else []
        self.tell(ClusterModels([told, *more]))

    def heard(self) -> FromFrontEnd:
        """Return the next message to the actor."""
        assert self.process.stdout is not None
        output = self.process.stdout
        wait_until(lambda: bool(select.select([output], [], [], 0)[0]), "the front end says something")
        return msgspec.json.decode(output.readline(), type=FromFrontEnd)

    def metric(self, name: str) -> float | None:
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return None if found is None else float(found[1])

    def end(self) -> None:
        self.http.close()
        super().end()


@contextlib.contextmanager
def ending(*processes: Process) -> Iterator[None]:
    """End the processes at the end, those that have ended too."""
    try:
        yield
    finally:
        for process in processes:
            process.end()
