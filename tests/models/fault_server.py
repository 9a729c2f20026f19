"""`python fault_server.py [DIR]... [--model-store DIR]`: the server with handlers that are in no table.

A model names its handler in its serving.properties: option.test_handler=module:Class. Models that cannot be loaded
leave the others be, unless SERVING_WAIT_MODEL_LOADING says otherwise. For tests only.

`python fault_server.py --template FD` is the process that tests/support/forked_servers.py talks to over a socket: it
imports everything once, and forks for every server and every run of `lmi-server` that is asked for. A fork of it can be
a template, too, with libraries by a name of forked_workers.py: the workers of its servers are forks as well, and it
forks for workers. `--templates FD` forks a template for each process that connects to the socket.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import logging
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from frontend.server import run
from lmi_server.commands.cli import app
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.options import ServingOptions
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.configuration.server_settings import resolve_server
from lmi_server.features import FEATURES, load
from lmi_server.processes.parents import end_with_parent
from lmi_server.serving.models.model_store import Startup, startup_sources

# What libraries import in the midst of a command or request.
_IMPORTED_LATE = ("anyio._backends._asyncio", "encodings.idna", "rich._emoji_codes", "typer._adapters")


def inspect(directory: Path, environment: Mapping[str, str], registration: Mapping[str, str]) -> Inspection:
    for pipe in directory.glob("never_read"):  # a named pipe in place of a file system that does not answer
        pipe.read_bytes()
    found = inspect_model(directory, environment, registration)
    chosen = found.unknown.get("option.test_handler")
    if chosen is None:
        return found
    return dataclasses.replace(found, spec=dataclasses.replace(found.spec, handler=chosen.raw))


def serve(command_line: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--model-store", type=Path)
    arguments = parser.parse_args(command_line)
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))  # the event loop hangs
    settings, _ = resolve_server({"SERVING_WAIT_MODEL_LOADING": "false", **os.environ}, {"port": 0})
    sources, _ = startup_sources(Startup(arguments.directories, model_store=arguments.model_store), {})
    of_models = {name: value for name, value in os.environ.items() if name.startswith("SAGEMAKER_")}
    if "TEST_LOOP_METER" in os.environ:
        from loop_meter import metered_loops

        with metered_loops(Path(os.environ["TEST_LOOP_METER"])):
            return run(sources, settings, of_models, inspect)
    return run(sources, settings, of_models, inspect)


def _prepare() -> None:
    """Import and build what every server and command does, and what several commands of the tests import late."""
    for feature in FEATURES:
        for path in filter(None, (feature.server, *feature.commands.values())):
            load(path)
    for spec in HANDLERS:
        load(spec.options)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    resolve_server({}, {})  # builds the validator of the settings
    ServingOptions.model_rebuild()


def fork_templates(listener: socket.socket) -> None:
    """Fork a template for each process that connects, and tell it the process id."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            connection.send(str(os.getpid()).encode())
            fork(connection)
            os._exit(0)
        connection.close()


def fork(connection: socket.socket) -> None:
    """Fork, or wait for the end of a fork and tell its exit code, for each request until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    while True:
        data, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 4)
        if not data:
            return
        asked = json.loads(data)
        answer = _exit_code(asked["ended"]) if "ended" in asked else _fork(asked, connection, descriptors)
        connection.send(str(answer).encode())


def _fork(asked: dict[str, Any], connection: socket.socket, descriptors: Sequence[int]) -> int:
    pid = os.fork()
    if pid == 0:
        connection.close()
        if asked["what"] == "worker":
            _be_worker(asked, descriptors)
        if asked["what"] == "template":
            _be_template(asked, socket.socket(fileno=descriptors[0]))
        for number, file in zip((2, 1, 0), reversed(descriptors), strict=False):
            os.dup2(file, number)
        os._exit(_run(asked))
    for file in descriptors:
        os.close(file)
    return pid


def _run(asked: dict[str, Any]) -> int:
    """Do what was asked for in this fork, in the place and with the variables that go with it; return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()  # each fork would draw the same numbers, among them Ray's ports
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    try:
        return {"server": serve, "command": command, "python": python}[asked["what"]](asked["arguments"])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - a fork must not go on as the template
        traceback.print_exc()
        return 1
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()


def _be_worker(asked: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Run the worker program; its command line names the descriptors by their numbers in the process that asks."""
    *inherited, stdout, stderr = descriptors
    here = {f"fd:{there}": f"fd:{number}" for there, number in zip(asked["inherited"], inherited, strict=True)}
    os.chdir(asked["directory"])
    os.environ.clear()
    program = importlib.import_module("forked_workers")
    program.run([here.get(word, word) for word in asked["arguments"]], asked["variables"], (stdout, stderr), inherited)
    raise AssertionError("the program ends its process")


def _be_template(asked: dict[str, Any], connection: socket.socket) -> NoReturn:
    """Import the libraries that are asked for, and fork until the connection is closed."""
    os.environ.clear()
    os.environ.update(asked["variables"])
    importlib.import_module("forked_workers").install(*asked["arguments"])
    fork(connection)
    os._exit(0)


def command(arguments: Sequence[str]) -> int:
    """Run `lmi-server`."""
    app(arguments)
    return 0


def python(arguments: Sequence[str]) -> int:
    """Run `python` with these arguments, a script or "-m MODULE" first, as the leader of a session."""
    os.setsid()
    sys.argv = list(arguments)
    run_program = runpy.run_path
    if sys.argv[0] == "-m":
        run_program = runpy.run_module
        del sys.argv[0]
    run_program(sys.argv[0], run_name="__main__")
    return 0


def _exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--template"]:
        _prepare()
        fork(socket.socket(fileno=int(sys.argv[2])))
    elif sys.argv[1:2] == ["--templates"]:
        _prepare()
        fork_templates(socket.socket(fileno=int(sys.argv[2])))
    else:
        sys.exit(serve(sys.argv[1:]))
