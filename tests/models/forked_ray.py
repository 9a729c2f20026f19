"""The workers of a node of Ray as forks, and what their actors start: `python forked_ray.py FD SOCKET`. Only for tests.

FD is the socket that listens at SOCKET, where `fork_requests.py` asks. A fork has imported Ray Serve, and what a
replica and a front end import: that is most of what a process of a cluster takes by itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_requests
import forked_workers

from lmi_server.processes.parents import end_with_parent
from lmi_server.ray.actors import child

_IMPORTED = (
    *("ray._private.workers.setup_worker", "ray.serve._private.replica", "ray.serve._private.controller"),
    *("lmi_server.ray.actors.ingress", "lmi_server.ray.actors.replica", "lmi_server.ray.actors.request_router"),
    *("lmi_server.ray.replica_process", "frontend.ray.ingress"),
)
_OF_RAY = ("RAY_JOB_ID", "RAY_RAYLET_PID")  # Ray reads them when it is imported
_LAST_DESCRIPTOR = 1 << 16


def prepare(variables: Mapping[str, str]) -> None:
    """Import what the first worker and the others need, with what Ray tells the first one."""
    if os.environ.keys() >= {*_OF_RAY}:
        return
    os.environ.update({name: variables[name] for name in _OF_RAY})
    forked_workers.install("worker")
    forked_workers.draw_names_of_actors_late()
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()


def be(asked: fork_requests.Asked) -> None:
    """Be the process that was asked for: a worker of Ray, or one that an actor starts."""
    imported_with = [os.environ[name] for name in _OF_RAY]
    os.chdir(asked.directory)
    os.environ.clear()
    os.environ.update(asked.variables)
    for number, file in enumerate(asked.files):
        os.dup2(file, number)
    os.closerange(len(asked.files), _LAST_DESCRIPTOR)
    if asked.words[0] == "-m":
        sys.argv = asked.words[1:]
        sys.exit(import_module(asked.words[1]).main())
    _be_worker_of_ray(asked.words, imported_with == [os.environ[name] for name in _OF_RAY])


def _be_worker_of_ray(words: Sequence[str], is_prepared: bool) -> None:
    from ray._private.runtime_env.context import RuntimeEnvContext, update_envs
    from ray._private.workers import setup_worker

    own, further = setup_worker.parser.parse_known_args(words)
    update_envs(RuntimeEnvContext.deserialize(own.serialized_runtime_env_context or "{}").env_vars)
    program = str(Path(setup_worker.__file__).with_name("default_worker.py"))
    if not is_prepared:
        os.execv(sys.executable, [sys.executable, program, *further])
    sys.argv = [program, *further]
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def start(path: str, command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[bytes]:
    """Start the process of an actor: a fork, but for one with variables of its own, which /proc does not show then."""
    if env == dict(os.environ):
        command = [sys.executable, "-I", "-S", fork_requests.__file__, path, *command[1:]]
    return subprocess.Popen(command, env=env, **more)


def main(listening: int, path: str) -> None:
    end_with_parent()
    vars(child)["subprocess"] = SimpleNamespace(
        Popen=functools.partial(start, path), PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    asked = fork_requests.Forks(socket.socket(fileno=listening), prepare).next_fork()
    with forked_workers.as_another_process():
        be(asked)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
