"""RequestHandlers that misbehave on purpose, for tests only. The first word of the body says how."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.handler import ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import Input


class RequestFaults(RequestHandler):
    """Answers with the size of the batch and the body, unless its first word names a fault."""

    def __init__(self) -> None:
        self._model_dir = Path()

    def start(self, model_dir: str, options: Any) -> ModelInfo:
        assert threading.current_thread() is threading.main_thread()
        self._model_dir = Path(model_dir)
        return ModelInfo(max_model_len=0)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        assert threading.current_thread() is threading.main_thread()
        return [self._answer(request, len(requests)) for request in requests]

    def _answer(self, request: Input, size: int) -> Response | LmiServerError:
        text = request.body().decode()
        fault, _, argument = text.partition(" ")
        match fault:
            case "refuse":
                return RequestError("refused")
            case "raise":
                raise ValueError("no such thing")
            case "memory":
                raise MemoryError("17 GiB")
            case "exit":
                os._exit(7)
            case "sys.exit":
                sys.exit(3)
            case "sleep":
                time.sleep(float(argument))
            case "wait":  # until the file is there
                while not (self._model_dir / argument).exists():
                    time.sleep(0.001)
            case "fork":
                if os.fork() == 0:
                    return Response(data=b"the child's")
            case "signals":
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_IGN)
            case "stream":
                return Response(stream=self._pieces(argument), after=self._after)
            case "after":
                return Response(data=text.encode(), after=self._after)
        return Response(data=f"{size} {text}".encode())

    def _pieces(self, argument: str) -> Iterator[bytes]:
        for word in argument.split():
            match word:
                case "raise":
                    raise ValueError("in the stream")
                case "exit":
                    sys.exit(3)
                case "forever":
                    while True:
                        yield b"x" * 1024
            yield word.encode()

    def _after(self) -> None:
        (self._model_dir / "after").touch()


class RaisingAtStart(RequestHandler):
    def start(self, model_dir: str, options: Any) -> ModelInfo:
        raise ValueError("not a model")

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        return []


class ExitingAtStart(RaisingAtStart):
    def start(self, model_dir: str, options: Any) -> ModelInfo:
        sys.exit("no weights")


class Short(RequestFaults):
    """Answers one request too few."""

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        return super().handle(requests)[1:]
