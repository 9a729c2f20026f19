"""One worker process: what the supervisor makes of its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from relay_helpers import load_of, on_loop

from lmi_server.configuration.resolve import resolve_model
from lmi_server.contract.batch_progress import BatchProgress
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.link import frame
from lmi_server.contract.protocol import Failed, FromWorker
from lmi_server.machine.mpi import OPEN_MPI, MpiRun
from lmi_server.serving.models.fetch_model import FetchedModel
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.plan_pool import plan_pool
from lmi_server.supervisor.launch import worker_launch
from lmi_server.supervisor.worker_process import MpiLauncher, WorkerProcess

# In place of the interpreter: gives its end of the link to the test, and exits.
GIVES_THE_LINK_AWAY = """#!{python} -SE
import socket, sys
link = int(sys.argv[sys.argv.index("--link") + 1].removeprefix("fd:"))
with socket.socket(socket.AF_UNIX) as test:
    test.connect({path!r})
    socket.send_fds(test, [b"link"], [link])
sys.exit(1)
"""


# Leaves a Unix socket in the directory that the variable names, and is killed.
LEAVES_A_SOCKET = """#!{python} -SE
import os, signal, socket
socket.socket(socket.AF_UNIX).bind(os.path.join(os.environ["SOCKETS"], "left"))
with open({path!r}, "w") as file:
    file.write(os.environ["SOCKETS"])
os.kill(os.getpid(), signal.SIGKILL)
"""


# In place of mpirun: runs the rank, whose command comes after some arguments.
STARTS_A_RANK = """#!/bin/sh
while [ "${1##*/}" != python ]; do shift; done
exec "$@"
"""


def worker_of(python: str, socket_directory: str = "", mpi: MpiLauncher | None = None) -> WorkerProcess:
    return WorkerProcess(
        "model-0",
        lambda *_: None,
        lambda _: None,
        lambda _: None,
        60.0,
        {},
        mpi,
        python=python,
        socket_directory=socket_directory,
    )


async def outcome_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, *messages: FromWorker) -> str:
    """Return why the load of a worker fails whose messages come when its process has ended."""
    path, python = tmp_path / "test.sock", tmp_path / "python"
    python.write_text(GIVES_THE_LINK_AWAY.format(python=sys.executable, path=str(path)))
    python.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener, caplog.at_level("INFO"):
        listener.bind(str(path))
        listener.listen()
        worker = worker_of(str(python))
        loading = asyncio.create_task(worker.load(load_of(tmp_path), 60.0))
        connection, _ = await asyncio.to_thread(listener.accept)
        with connection:
            _, (descriptor,), _, _ = await asyncio.to_thread(socket.recv_fds, connection, 4, 1)
        with socket.socket(fileno=descriptor) as link:
            while "exited with code 1" not in caplog.text:  # noqa: ASYNC110 - only logging says so
                await asyncio.sleep(0)
            for message in messages:
                link.sendall(b"".join(frame(message)))
            with pytest.raises(ModelLoadError) as failure:
                await loading
        await worker.reap()
    return failure.value.message


@on_loop
async def test_a_refusal_that_is_read_after_the_end_of_the_process_is_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = Failed(ModelLoadError.__name__, "the weights are missing")
    assert await outcome_of(tmp_path, caplog, refusal) == "the weights are missing"


@on_loop
async def test_a_process_that_said_nothing_is_the_reason_itself_though_its_link_stays_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "the worker process exited with code 1 while it loaded the model"
    assert await outcome_of(tmp_path, caplog) == reason


@pytest.mark.parametrize("in_group", [False, True], ids=["process", "group"])
@on_loop
async def test_the_sockets_of_a_worker_go_with_it_however_it_ends(in_group: bool, tmp_path: Path) -> None:
    path, python, mpirun = (tmp_path / name for name in ("directory", "python", "mpirun"))
    python.write_text(LEAVES_A_SOCKET.format(python=sys.executable, path=str(path)))
    mpirun.write_text(STARTS_A_RANK)
    for program in (python, mpirun):
        program.chmod(0o755)
    group = MpiLauncher(MpiRun(str(mpirun), OPEN_MPI, "4.1"), 2) if in_group else None
    directories = set()
    for _ in range(2):
        worker = worker_of(str(python), "SOCKETS", group)
        with pytest.raises(ModelLoadError, match="was ended by SIGKILL"):
            await worker.load(load_of(tmp_path), 60.0)
        directory = Path(path.read_text())
        assert len(str(directory)) < 60, "with a name of 36 characters it is the path of a Unix socket, of 107 bytes"
        await worker.reap()
        directories.add(directory)
    assert len(directories) == 2
    assert not await asyncio.to_thread(lambda: [path for path in directories if path.exists()])


@pytest.mark.parametrize("place", ["", "server", "model"])
def test_a_directory_for_sockets_that_the_user_names_stays(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    if place == "server":
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    keys = {"option.rolling_batch": "vllm"} | ({"option.env": "VLLM_RPC_BASE_PATH=/run"} if place == "model" else {})
    resolved = resolve_model(tmp_path, {}, keys)
    planned = plan_pool(ModelSource(str(tmp_path), "m"), FetchedModel(resolved, sys.executable, ()), {}, {"": "INFO"})
    assert planned.socket_directory == ("" if place else "VLLM_RPC_BASE_PATH")


@pytest.mark.parametrize("step", [(BatchProgress, "create"), (fcntl, "flock")], ids=["progress", "lock"])
@on_loop
async def test_a_worker_that_cannot_be_started_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[object, str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(worker_launch, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(*step, fail)
    worker = worker_of(sys.executable, "SOCKETS")
    with pytest.raises(ModelLoadError, match="No locks available"):
        await worker.load(load_of(tmp_path), 60.0)
    await worker.reap()
    assert not [name for name in os.listdir(tmp_path) if name.startswith("lmi-")]


def test_the_end_of_a_worker_bears_what_it_left_and_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_launch, "SHARED_MEMORY", tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    linking, deep = worker_launch.PrivateDirectory(), worker_launch.PrivateDirectory()
    Path(linking.path, "link").symlink_to(kept)
    linking.remove()
    assert not Path(linking.path).exists()
    assert kept.exists()
    with contextlib.chdir(deep.path):
        for _ in range(sys.getrecursionlimit()):
            os.mkdir("d")
            os.chdir("d")
    deep.remove()
    refused = f"{deep.path} holds too many directories within each other" in caplog.text
    assert Path(deep.path).exists() == refused, "from some Python on, rmtree does not call itself"
    subprocess.run(["rm", "-rf", deep.path], check=True)
