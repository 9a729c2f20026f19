"""A worker that is a group of MPI ranks: each process connects to the front end, and all but rank 0 follow rank 0."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
from pathlib import Path

from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.handler import LLMHandler, RequestHandler
from lmi_server.contract.link import frame, read_load
from lmi_server.contract.protocol import Failed
from lmi_server.contract.ranks import RANK_BYTES, Rank
from lmi_server.machine.environment import own_rank, take_rank
from lmi_server.processes.descriptors import keep_from_children
from lmi_server.worker.handler_loading import load_failure, make_handler
from lmi_server.worker.memory_limit import excess

_MEMORY_CHECK_S = 1.0

logger = logging.getLogger(__name__)


def join_group(path: str) -> tuple[Rank, socket.socket]:
    """Connect to the front end's socket at `path` and send the number of this rank; return both.

    mpirun passes no file descriptors on, so a rank cannot inherit its link as other workers do.
    """
    rank = take_rank(str(Path(path).parent))
    link = socket.socket(socket.AF_UNIX)
    keep_from_children(link.fileno())
    link.connect(path)
    link.sendall(rank.rank.to_bytes(RANK_BYTES, "big"))
    return rank, link


def remove_group_files() -> None:
    """Remove the files of this process's group, if it has one: the front end, which is gone, cannot do it any more."""
    directory = own_rank().directory
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def check_follows(handler: LLMHandler | RequestHandler) -> None:
    """Raise ModelLoadError if `handler` cannot run as a group of ranks."""
    if type(handler).follow in (LLMHandler.follow, RequestHandler.follow):
        raise ModelLoadError("this model's handler does not run under engine=MPI; set engine=Python")


def follow(link: socket.socket) -> int:
    """Load the model and do what rank 0 sends until it sends the end; return the exit code of the process."""
    load = read_load(link)
    logging.getLogger().setLevel(load.log_level)
    threading.Thread(target=_end_with_front_end, args=(link,), name="link", daemon=True).start()
    if load.memory_limit_mb:
        threading.Thread(target=_end_above, args=(load.memory_limit_mb,), name="memory", daemon=True).start()
    try:
        handler, loading = make_handler(load)
        check_follows(handler)
        handler.follow(loading.model_dir, loading.options)
    except Exception as error:  # the border to handlers and engines, which raise anything; the load fails with it
        logger.exception("the rank cannot load the model, or failed while it followed rank 0")
        failure = load_failure(error)
        link.sendall(b"".join(frame(Failed(failure.kind, failure.message))))
        return 1
    return 0


def _end_with_front_end(link: socket.socket) -> None:
    """End the process with the link, from a thread: the main thread may be inside the engine for minutes."""
    while link.recv(65536):
        pass  # the front end sends a follower nothing after its Load
    logger.error("the front end is gone; the rank ends")
    remove_group_files()
    os._exit(1)


def _end_above(memory_limit_mb: int) -> None:
    """End the process, and with it the group, once it takes too much memory."""
    while (taken := excess(memory_limit_mb)) is None:
        time.sleep(_MEMORY_CHECK_S)
    logger.error("%s", taken)
    os._exit(1)
