"""Workers as forks of their server, which has imported what they need: a start costs no imports. For tests only.

`install` replaces how lmi_server/supervisor/launch/worker_launch.py starts a process. A fork reads no PYTHONPATH: the
variable TEST_PACKAGES is a folder of packages for it. The ranks of a group are forks as
well (fork_requests.py), but for those with no more libraries than every worker: their groups start as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import socket
import sys
import traceback
from asyncio.subprocess import Process
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import fork_requests
from forked_process import as_process

from handlers.checkpoints.options import THREAD_VARIABLES
from handlers.vllm.description import VllmEngine
from handlers.vllm.options import VllmOptions
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.handlers import load as load_class
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine
from lmi_server.processes import model_imports
from lmi_server.processes.parents import end_with_parent
from lmi_server.supervisor.launch import worker_launch as launch
from lmi_server.worker import __main__ as worker_program

_OF_EVERY_WORKER = ("handlers.own_code.handler", "handlers.echo.handler")  # and nothing but what every worker imports
LIBRARIES = {
    "worker": _OF_EVERY_WORKER,
    "tune": (
        *(*_OF_EVERY_WORKER, "lmi_server.tune.command", "lmi_server.tune.search", "frontend.server"),
        *("optuna.storages._rdb.models", "alembic.command", "sqlalchemy.dialects.sqlite"),  # for the file of a study
    ),
    "transformers": (
        *("handlers.huggingface.model", "handlers.rolling_batch.engine_loading", "handlers.tasks.task_loading"),
        *("handlers.tasks.text_tasks", "handlers.tasks.transformers_pipeline", "handlers.tasks.encoders.embedding"),
        *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
        *("handlers.rolling_batch.fused.cpu_rows", "handlers.cpu_kernels.attention.chunks"),
        *("handlers.cpu_kernels.attention.decoding", "handlers.cpu_kernels.linear"),
    ),
    "deepspeed": (
        *("deepspeed", "handlers.deepspeed.model", "handlers.deepspeed.tasks", "handlers.rolling_batch.engine_loading"),
        *("handlers.tasks.text_tasks", "handlers.tasks.transformers_pipeline"),
        *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
    ),
    "diffusers": (
        *("handlers.stable_diffusion.handler", "handlers.stable_diffusion.pipelines", "peft"),
        *("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "transformers.models.clip.modeling_clip"),
    ),
    "vllm": ("handlers.vllm.engine.loading", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama"),
    "ray": ("lmi_server.ray.cluster", "lmi_server.ray.deployments.model_files"),
}
"""What the workers and commands of a template have imported, by the name that the template is asked for with."""

_start = launch._execute
_LAST_DESCRIPTOR = 1 << 16
_SOCKET = "forks"  # in the directory of a group


def install(libraries: str) -> None:
    """Import the modules of LIBRARIES; from now on, each worker is a fork of the process that starts it."""
    os.environ.update(_variables(libraries))  # the libraries read them when they are imported
    model_imports.prepare()
    if libraries == "ray":
        draw_names_of_actors_late()
    for name in LIBRARIES[libraries]:
        import_module(name)
    if libraries == "transformers":  # numba's own modules, which the first kernel of a process would import
        import_module("numba.core.registry").cpu_target.target_context.refresh()
    for spec in HANDLERS:  # a thread of the server that imports one would keep its lock in a fork for ever
        load_class(spec.options)
    model_imports.freeze_libraries()
    launch._execute = _execute if libraries in ("worker", "tune") else _execute_or_group
    if libraries == "tune":
        import_module("forked_trial_server").install()


def draw_names_of_actors_late() -> None:
    """Keep the forks of this process, which has not imported Ray, from drawing the same names for what they ask for.

    Each class of an actor draws a number when it is defined. Ray's generator would begin with that, and each fork would
    go on from there.
    """
    ray = import_module("ray.actor")
    known = ray.ActorClassID
    vars(ray)["ActorClassID"] = SimpleNamespace(from_random=lambda: known(os.urandom(known.size())))


def _variables(libraries: str) -> Mapping[str, str]:
    if libraries != "vllm":
        return THREAD_VARIABLES
    recommended = VllmEngine.recommend(this_machine(process_environment()))
    options = {key.removeprefix("option."): value for key, value in recommended.items()}
    return VllmEngine(HANDLERS.by_title("vllm"), VllmOptions.model_validate(options)).worker_environment()


async def _execute(command: Sequence[str], variables: Mapping[str, str], inherited: Sequence[int] = ()) -> Process:
    if command[0] != sys.executable or "PYTHONPATH" in variables:
        return await _start(command, variables, inherited)
    return await _forked(run, command, variables, inherited)


async def _execute_or_group(
    command: Sequence[str], variables: Mapping[str, str], inherited: Sequence[int] = ()
) -> Process:
    if sys.executable in command[1:]:
        return await _forked(_run_group, command, variables, inherited)
    return await _execute(command, variables, inherited)


async def _forked(
    be: Callable[..., NoReturn], command: Sequence[str], variables: Mapping[str, str], inherited: Sequence[int]
) -> Process:
    outputs = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        be(command, variables, [writing for _, writing in outputs], inherited)
    for _, writing in outputs:
        os.close(writing)
    stdout, stderr = (reading for reading, _ in outputs)
    return await as_process(pid, stdout, stderr, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def run(
    command: Sequence[str], variables: Mapping[str, str], outputs: Iterable[int], inherited: Sequence[int]
) -> NoReturn:
    """Be the process that `command` starts."""
    with as_another_process():
        os.setsid()
        _work(command, variables, outputs, inherited)


def _work(
    command: Sequence[str], variables: Mapping[str, str], outputs: Iterable[int], inherited: Sequence[int]
) -> NoReturn:
    _keep_files(outputs, inherited)
    _forget_the_server()
    os.environ.update(variables)
    sys.path[:0] = filter(None, [variables.get("TEST_PACKAGES")])
    sys.orig_argv = list(command)
    sys.argv = list(command[command.index("-m") + 1 :])
    sys.modules["__main__"] = worker_program  # processes that an engine spawns import it
    sys.exit(worker_program.main())


def be_command(arguments: Sequence[str], output: int) -> NoReturn:
    """Be `lmi-server` with these arguments, in a group of its own, which ends with its parent."""
    from lmi_server.commands.cli import app

    with as_another_process():
        os.setpgid(0, 0)
        end_with_parent()
        _keep_files((output, output), ())
        _forget_the_server()
        app(arguments)
    raise AssertionError("the process has ended")


def _run_group(
    command: Sequence[str], variables: Mapping[str, str], outputs: Iterable[int], inherited: Sequence[int]
) -> NoReturn:
    """Be the mpirun that `command` starts, and the parent of a process that forks its ranks."""
    with as_another_process():
        os.setsid()
        _keep_files(outputs, inherited)
        _forget_the_server()
        os.environ.update(variables)
        link = command[command.index("--link") + 1].removeprefix("unix:")
        path = str(Path(link).with_name(_SOCKET))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen()
        if os.fork() == 0:
            end_with_parent()
            _fork_ranks(listener)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        place = command.index(sys.executable)
        rank = [sys.executable, "-I", "-S", fork_requests.__file__, path, *command[place:]]
        os.execve(command[0], [*command[:place], *rank], os.environ)


def _fork_ranks(listener: socket.socket) -> NoReturn:
    program, variables, directory, (_, *outputs) = fork_requests.Forks(listener).next_fork()
    os.chdir(directory)
    os.environ.clear()
    # A process cannot change what /proc shows as its environment.
    Path("/proc/self/comm").write_text(f"rank {variables['OMPI_COMM_WORLD_RANK']}")
    _work(program, variables, outputs, ())


@contextlib.contextmanager
def as_another_process() -> Iterator[None]:
    """End this process with what runs in it: a fork must not go on as the server."""
    gc.freeze()  # an object of the server that is collected here may close a file of the worker
    code = 1
    try:
        yield
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _keep_files(outputs: Iterable[int], inherited: Sequence[int]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in zip((1, 2), outputs, strict=True):
        os.dup2(file, number)
    first = 3
    for descriptor in sorted(inherited):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, _LAST_DESCRIPTOR)


def _forget_the_server() -> None:
    """Undo what the server has set up for its process: signals, the log, the loop."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    asyncio._set_running_loop(None)
    random.seed()
