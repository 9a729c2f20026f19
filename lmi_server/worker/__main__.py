"""`python -m lmi_server.worker --link fd:N`: one worker process. Started by the supervisor, never by hand."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys

import uvloop

from lmi_server.link import frontend_link
from lmi_server.worker.session import Session

_PR_SET_PDEATHSIG = 1
_SIGTERM_DEADLINE_S = 30.0

logger = logging.getLogger("lmi_server.worker")


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the front end decides
    _die_with_parent()
    return uvloop.run(_serve(arguments.link))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lmi_server.worker")
    parser.add_argument("--link", required=True, type=_link, help="fd:N, the inherited end of the link")
    return parser.parse_args()


def _link(value: str) -> socket.socket:
    link = socket.socket(fileno=int(value.removeprefix("fd:")))
    link.set_inheritable(False)  # a process that a handler starts must not hold the link open
    link.setblocking(False)
    return link


async def _serve(inherited: socket.socket) -> int:
    session = Session()
    closed = asyncio.Event()  # not before all that was sent is on its way

    def on_lost() -> None:
        if not session.ending:
            _die()
        closed.set()

    link = frontend_link(session.on_message, on_lost)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: link, sock=inherited)
    session.attach(link)
    loop.add_signal_handler(signal.SIGTERM, session.shut_down, _SIGTERM_DEADLINE_S)
    await closed.wait()
    return session.exit_code


def _die() -> None:
    """End at once, with every process that a handler started: nobody is left to serve."""
    logger.error("the front end is gone")
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _die_with_parent() -> None:
    """Have the kernel end this process with the front end, so that not even a hung worker outlives it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
