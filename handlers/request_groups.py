"""The base of handlers that answer a batch in groups of requests which may run together.

If a group fails, each of its requests runs alone: only impossible ones fail.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lmi_server.contract.errors import (
    EXITS,
    HandlerError,
    LmiServerError,
    ModelMemoryError,
    RequestError,
    failure_of,
    first_line,
    is_device_failure,
)
from lmi_server.contract.handler import RequestHandler, Response
from lmi_server.contract.protocol import Input
from lmi_server.media.budget import media_of_request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParsedRequest:
    """One parsed request: its inputs, and the function that writes their results."""

    inputs: Sequence[Any]
    write: Callable[[Sequence[Any]], Response]


Parsed = TypeVar("Parsed", bound=ParsedRequest)


class GroupHandler(RequestHandler, Generic[Parsed]):
    """Reads the requests of a batch, and runs those of each group at once."""

    @abstractmethod
    def parse(self, request: Input) -> Parsed:
        """Return a request, parsed. Raises RequestError."""

    @abstractmethod
    def group_of(self, call: Parsed) -> Hashable:
        """Return a key that is equal for requests which may run together; None for one that must run alone."""

    @abstractmethod
    def run(self, inputs: Sequence[Any], calls: Sequence[Parsed]) -> Sequence[Any]:
        """Return a result for each of `inputs`, those of `calls`. One that is an LmiServerError fails its request."""

    def read(self, request: Input) -> Parsed:
        """Return a request, parsed; what its media take counts together. Raises RequestError."""
        with media_of_request():
            return self.parse(request)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        outcomes: dict[int, Response | LmiServerError] = {}
        groups: dict[Hashable, dict[int, Parsed]] = {}
        for index, request in enumerate(requests):
            try:
                call = self.read(request)
                key = self.group_of(call)
            except Exception as error:  # noqa: BLE001 - what a parser did not expect fails one request, not its batch
                outcomes[index] = pipeline_failure(error)
            else:
                groups.setdefault(("alone", index) if key is None else key, {})[index] = call
        for group in groups.values():
            outcomes |= zip(group, self.answers(list(group.values())), strict=True)
        return [outcomes[index] for index in range(len(requests))]

    def answers(self, calls: Sequence[Parsed]) -> Sequence[Response | LmiServerError]:
        """Return the answers to the requests of one group. Ends the process if a GPU has failed under it."""
        inputs = [item for call in calls for item in call.inputs]
        try:
            results = self.run(inputs, calls)
            if len(results) != len(inputs):
                raise HandlerError(f"the model returned {len(results)} results for {len(inputs)} inputs")
        except EXITS:
            raise
        except BaseException as error:  # the border to engines (Rust's panics are no Exception)
            if (ends_process := device_failure(error)) is not None:
                raise ends_process from error
            if len(calls) > 1:
                return [answer for call in calls for answer in self.answers([call])]
            return [self.failure(calls[0], error)]
        rest = iter(results)
        return [_answer(call, [next(rest) for _ in call.inputs]) for call in calls]

    def failure(self, call: Parsed, error: BaseException) -> LmiServerError:
        """Return the error of a request that failed alone."""
        return pipeline_failure(error)


def _answer(call: ParsedRequest, results: Sequence[Any]) -> Response | LmiServerError:
    failed = next((result for result in results if isinstance(result, LmiServerError)), None)
    if failed is not None:
        return failed
    try:
        return call.write(results)
    except Exception as error:  # noqa: BLE001 - the border to Pillow: a format may not hold images of that size
        return pipeline_failure(error)


def pipeline_failure(error: BaseException) -> LmiServerError:
    """Return the error of a request on which a library's pipeline failed."""
    if isinstance(error, LmiServerError):
        return error
    failure = failure_of(error)
    if isinstance(failure, ModelMemoryError):
        return failure
    if isinstance(error, ValueError):  # the steps of a pipeline raise it for an input or a parameter
        return RequestError(failure.message)
    logger.error("the model failed", exc_info=error)
    return failure


def device_failure(error: BaseException) -> SystemExit | None:
    """Return the error that ends this process if the GPU has failed, because nothing can use it any more; None
    otherwise."""
    return SystemExit(f"the GPU failed: {first_line(error)}") if is_device_failure(error) else None
