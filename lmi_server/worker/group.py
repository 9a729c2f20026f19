"""A worker process that is a rank of an MPI group: it connects to the front end, and, beside rank 0, follows."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from pathlib import Path

from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.handler import LLMHandler, RequestHandler
from lmi_server.contract.link import frame, read_load
from lmi_server.contract.protocol import Failed
from lmi_server.contract.ranks import RANK_BYTES, Rank
from lmi_server.machine.environment import own_rank, take_rank
from lmi_server.worker.handler_loading import load_failure, make_handler

logger = logging.getLogger(__name__)


def join_group(path: str) -> tuple[Rank, socket.socket]:
    """Connect to the front end's socket and say which rank this is."""
    rank = take_rank(str(Path(path).parent))
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    link.sendall(rank.rank.to_bytes(RANK_BYTES, "big"))
    return rank, link


def leave_group() -> None:
    """Remove the files of the group that this process belongs to, for the front end that cannot do it any more."""
    directory = own_rank().directory
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def following(handler: LLMHandler | RequestHandler) -> LLMHandler | RequestHandler:
    """Return the handler as one that runs as a group of ranks. Raises ModelLoadError where it cannot."""
    if type(handler).follow in (LLMHandler.follow, RequestHandler.follow):
        raise ModelLoadError("this model's handler does not run under the MPI engine; use engine=Python")
    return handler


def follow(link: socket.socket) -> int:
    """Load what the front end says and do what rank 0 says; return the exit code of the process."""
    load = read_load(link)
    logging.getLogger().setLevel(load.log_level)
    threading.Thread(target=_end_with_front_end, args=(link,), name="link", daemon=True).start()
    try:
        handler, loading = make_handler(load)
        following(handler).follow(loading.model_dir, loading.options)
    except Exception as error:  # the border to handlers and engines, which raise anything; the load fails with it
        logger.exception("the rank failed")
        failure = load_failure(error)
        link.sendall(b"".join(frame(Failed(failure.kind, failure.message))))
        return 1
    return 0


def _end_with_front_end(link: socket.socket) -> None:
    while link.recv(65536):
        pass  # nothing is said to a follower beside what it loads
    logger.error("the front end is gone")
    leave_group()
    os._exit(1)
