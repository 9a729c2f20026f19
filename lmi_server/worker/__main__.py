"""One worker process: `python -m lmi_server.worker --link fd:N`. The supervisor starts it."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import functools
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import uvloop

from lmi_server.contract.batch_progress import BatchProgress
from lmi_server.contract.handler import RequestHandler
from lmi_server.contract.link import FrontendLink, frontend_link, read_load
from lmi_server.machine.environment import own_rank
from lmi_server.processes import model_imports
from lmi_server.processes.descriptors import keep_from_children
from lmi_server.processes.parents import end_with_parent
from lmi_server.worker.answers.frame_buffer import FrameBuffer
from lmi_server.worker.group import check_follows, follow, join_group, remove_group_files
from lmi_server.worker.handler_loading import Loading, make_handler
from lmi_server.worker.log import log_to_stderr
from lmi_server.worker.processors.generation import GenerationProcessor
from lmi_server.worker.services.base import WorkerService
from lmi_server.worker.services.concurrent import ConcurrentService
from lmi_server.worker.services.threaded import ThreadedService
from lmi_server.worker.worker import Worker

_SIGTERM_DEADLINE_S = 30.0
_COMPAT = Path(__file__).parent.parent / "compat"  # holds djl_python
_EXIT_S = 5.0  # for the end of the handler's thread, once the link is closed

logger = logging.getLogger("lmi_server.worker")


def main() -> int:
    arguments = _arguments()
    faulthandler.enable()
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the front end decides
    end_with_parent()
    model_imports.prepare()
    sys.path.insert(0, str(_COMPAT))
    if arguments.link.startswith("unix:"):
        rank, link = join_group(arguments.link.removeprefix("unix:"))
        if rank.rank > 0:
            return follow(link)
        return _lead(link, arguments.progress)
    return _lead(socket.socket(fileno=_inherit(arguments.link)), arguments.progress)


def _lead(link: socket.socket, progress: BatchProgress | None) -> int:
    """Serve the model, as the only process of the worker or as rank 0 of its group; return the exit code."""
    load = read_load(link)
    for name, level in {"": load.log_level, **load.log_levels}.items():
        logging.getLogger(name).setLevel(level)
    link.setblocking(False)
    try:
        handler, loading = make_handler(load)
        if own_rank().size > 1:
            check_follows(handler)
    except BaseException as error:  # noqa: BLE001 - the border to handlers, which raise anything; the load fails
        return uvloop.run(_serve(link, Worker(load, functools.partial(_raise, error))))
    if isinstance(handler, RequestHandler):
        return _serve_requests(link, handler, loading, progress)
    processor = GenerationProcessor(handler, loading)
    worker = Worker(load, lambda link: ConcurrentService(processor, FrameBuffer(link)))
    return uvloop.run(_serve(link, worker, signals=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lmi_server.worker")
    parser.add_argument(
        "--link", required=True, help="fd:N, the inherited end of the link; or unix:PATH of a group of ranks"
    )
    parser.add_argument("--progress", type=_progress, help="the page of BatchProgress: inherited fd:N, or file:PATH")
    return parser.parse_args()


def _inherit(value: str) -> int:
    """Return the file descriptor of "fd:N"; processes of a handler do not inherit it."""
    fd = int(value.removeprefix("fd:"))
    keep_from_children(fd)
    return fd


def _progress(value: str) -> BatchProgress:
    if value.startswith("file:"):
        return BatchProgress.open_file(value.removeprefix("file:"))
    return BatchProgress(_inherit(value))


def _raise(error: BaseException, link: FrontendLink) -> WorkerService:
    """Raise, in place of making a service, what was raised before there was a loop to report it with."""
    raise error


def _serve_requests(
    link: socket.socket, handler: RequestHandler, loading: Loading, progress: BatchProgress | None
) -> int:
    """Run the handler's code in this thread, the main one, and the link in another; return the exit code."""
    service = ThreadedService(handler, loading, progress or BatchProgress.create()[0])
    worker = Worker(loading.load, lambda link: service.attach(link, worker.end))
    signal.signal(signal.SIGTERM, lambda *_: service.call_link(worker.shut_down, _SIGTERM_DEADLINE_S))
    link_thread = threading.Thread(target=_run_link, args=(link, worker, service), name="link")
    link_thread.start()
    code = service.run()
    link_thread.join()
    return code or worker.exit_code


def _run_link(link: socket.socket, worker: Worker, service: ThreadedService) -> None:
    code = 1
    try:
        code = uvloop.run(_serve(link, worker))
    finally:
        try:
            service.end_run().result(0 if service.abandoned else _EXIT_S)
        except TimeoutError:
            # The main thread hangs in the handler's code, which Python cannot interrupt from here.
            os._exit(code)


async def _serve(inherited: socket.socket, worker: Worker, signals: bool = False) -> int:
    # Set when the transport reports the end: until then, messages that were sent may still be in its buffer.
    closed = asyncio.Event()

    def on_lost() -> None:
        if not worker.ending:
            _end_at_once()
        closed.set()

    link = frontend_link(worker.on_message, on_lost)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: link, sock=inherited)
    worker.attach(link)
    if signals:
        loop.add_signal_handler(signal.SIGTERM, worker.shut_down, _SIGTERM_DEADLINE_S)
    await closed.wait()
    return worker.exit_code


def _end_at_once() -> None:
    """Kill this process and every process that a handler started: there is nothing left to serve."""
    logger.error("the front end is gone; the worker ends")
    remove_group_files()
    # The supervisor makes each worker the leader of a process group. Under mpirun, or by hand, others may be in it.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
