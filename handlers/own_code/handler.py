"""Serves the user's own code: a function in the contract of LMI's `djl_python`, or a handler of `lmi_server`'s own.

On several ranks (engine=MPI), rank 0 sends each batch of requests to the others as it came. All ranks call the code
with it, because its model may need every rank. Rank 0 alone answers.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from handlers.batch_messages import Batch, Stop, decode, encode
from handlers.own_code.generate import ConcurrentDelegate, GenerateFunction
from handlers.own_code.options import OwnCodeOptions
from handlers.user_code import find_class, find_marked, load_entry_point
from lmi_server.contract.errors import LmiServerError, ModelLoadError, RequestError
from lmi_server.contract.handler import AsyncRequestHandler, LLMHandler, ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import Adapter, Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.machine.environment import extend_python_path, own_rank
from lmi_server.media import public_addresses
from lmi_server.processes import model_imports

if TYPE_CHECKING:
    from handlers.ranks.communicator import Communicator

logger = logging.getLogger(__name__)

_Handler: TypeAlias = RequestHandler | AsyncRequestHandler | LLMHandler
_HANDLERS: tuple[type[_Handler], ...] = (RequestHandler, AsyncRequestHandler, LLMHandler)
_SCRIPT = (
    "pre_model_fn",
    "model_fn",
    "model_warmup_fn",
    "input_fn",
    "predict_fn",
    "output_fn",
    "transform_fn",
)
_FORMATTERS = ("input_formatter", "output_formatter")


class OwnCodeHandler(RequestHandler):
    """Imports the entry point and leaves everything to the handler that it defines."""

    reads_tensors = True

    def __init__(self) -> None:
        self._code: RequestHandler
        self._communicator: Communicator | None = None  # with the other ranks, if there are any

    def start(self, model_dir: str, options: OwnCodeOptions) -> ModelInfo:
        os.chdir(model_dir)  # LMI's workers run there, so user code opens its files by relative names
        sys.path.insert(0, model_dir)
        extend_python_path(model_dir)
        if options.allow_private_media:
            public_addresses.allow_private()
        self._code = _code_of(load_entry_point(options.entry_point, model_dir), options)
        self._code.served_names = self.served_names
        rank = own_rank()
        if rank.size > 1:
            from handlers.ranks.communicator import Communicator  # it imports torch

            self._communicator = Communicator(rank)
        info = self._code.start(model_dir, options)
        if self._communicator is not None and self._code.concurrent_handler() is not None:
            raise ModelLoadError(
                "code that serves requests concurrently or batches them itself runs as one process; "
                "set option.tensor_parallel_degree=1"
            )
        return info

    def follow(self, model_dir: str, options: OwnCodeOptions) -> None:
        self.start(model_dir, options)
        model_imports.finish_loading()
        assert self._communicator is not None
        while isinstance(message := decode(self._communicator.receive()), Batch):
            _run_to_the_end(self._code.handle(message.requests))

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        if self._communicator is None:
            return self._code.handle(requests)
        self._communicator.broadcast(encode(Batch(0, list(requests))))
        return [_running_to_the_end(outcome) for outcome in self._code.handle(requests)]

    def concurrent_handler(self) -> AsyncRequestHandler | LLMHandler | None:
        return self._code.concurrent_handler()

    def add_adapter(self, adapter: Adapter) -> str:
        if self._communicator is not None:
            raise RequestError("code on several ranks has no adapters; set option.tensor_parallel_degree=1")
        return self._code.add_adapter(adapter)

    def remove_adapter(self, name: str) -> str:
        return self._code.remove_adapter(name)

    def stop(self) -> None:
        if self._communicator is not None:
            self._communicator.broadcast(encode(Stop()))
        self._code.stop()


def _run_to_the_end(outcomes: Sequence[Response | LmiServerError]) -> None:
    """Do what sending the answers does on rank 0: take a piece of each stream in turn, and drop it."""
    answers = [outcome for outcome in outcomes if isinstance(outcome, Response)]
    streams = [iter(answer.stream) for answer in answers if isinstance(answer.stream, Iterator)]
    while streams:
        streams = [stream for stream in streams if _advance(stream)]


def _advance(stream: Iterator[bytes]) -> bool:
    try:
        return next(stream, None) is not None
    except Exception:  # the border to the user's code; rank 0 reports it
        logger.exception("a stream raised on this rank")
        return False


def _running_to_the_end(outcome: Response | LmiServerError) -> Response | LmiServerError:
    """Return an answer whose stream runs to its end, also if its client leaves: the other ranks go on with it."""
    if isinstance(outcome, Response) and isinstance(outcome.stream, Iterator):
        outcome.stream = _drain(outcome.stream)
    return outcome


def _drain(pieces: Iterator[bytes]) -> Iterator[bytes]:
    try:
        for piece in pieces:  # noqa: UP028 - `yield from` would close `pieces` with this generator
            yield piece
    finally:
        for _ in pieces:
            pass


def _code_of(module: ModuleType, options: OwnCodeOptions) -> RequestHandler:
    """Return a handler for what `module` defines: a function of LMI's contract, a handler class, or `generate`.

    The functions of a script for SageMaker's framework containers do as well.

    Raises ModelLoadError if it defines none of them.
    """
    function = getattr(module, options.handler, None)
    if callable(function):
        # Late, because they import djl_python.
        from handlers.own_code.djl.adapters import functions_in
        from handlers.own_code.djl.function import DjlFunction

        return DjlFunction(function, find_marked(module, _FORMATTERS), functions_in(module))
    script = {name: found for name in _SCRIPT if callable(found := getattr(module, name, None))}
    if script:
        from handlers.own_code.djl.function import DjlFunction
        from handlers.own_code.framework_functions import JSON, Script

        accept = options.given.get("default_accept", JSON)
        return DjlFunction(Script(script, accept, str(module.__file__)), {}, {}, is_script=True)
    handler = find_class(module, _HANDLERS)
    if handler is not None:
        made = handler()
        return made if isinstance(made, RequestHandler) else ConcurrentDelegate(made)
    generate = getattr(module, "generate", None)
    if inspect.isasyncgenfunction(generate):
        return ConcurrentDelegate(GenerateFunction(generate))
    raise ModelLoadError(
        f"{module.__file__}: defines no function {excerpt(options.handler)} (option.handler), no class derived from "
        f"{', '.join(cls.__name__ for cls in _HANDLERS)}, and no asynchronous generator generate; define one of them"
    )
