"""Serves with a function that forms its own batches.

It is called once per step with all running requests, and gets each of them in full only in the first step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any, NamedTuple

from djl_python.inputs import Input, make_input
from djl_python.outputs import Output

from handlers.own_code.djl.adapters import AdapterFunctions
from handlers.own_code.djl.inputs import ADAPTER, sent_properties
from handlers.own_code.djl.outputs import (
    FAILED,
    OUT_OF_MEMORY,
    STEP_FAILED,
    headers_of,
    in_batch,
    piece_error,
    step_error,
)
from handlers.own_code.user_function import UserFunction
from handlers.user_code import format_user_error
from lmi_server.contract.errors import (
    EXITS,
    HandlerError,
    LmiServerError,
    WorkerDiedError,
    describe,
    exit_message,
    is_out_of_memory,
)
from lmi_server.contract.handler import AsyncRequestHandler, Response
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.protocol import Input as Request

logger = logging.getLogger(__name__)

_RAISED = "exception occurred during rolling batch inference"
_SEEDS = 1 << 31


class _Step(NamedTuple):
    """The result of one step for one request."""

    data: str
    last: bool
    headers: dict[str, Any]
    error: str | None = None
    code: int = FAILED
    failure: LmiServerError | None = None
    of_all: bool = False  # an error of the step, not of this request


class _RunningRequest:
    """A request that the function gets at every step, from the next one on."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_new = True
        self.steps: asyncio.Queue[_Step] = asyncio.Queue()


class RollingFunction(AsyncRequestHandler):
    """Steps while there are running requests, at most `size` at once.

    A request whose client has left runs to its end: LMI's contract has no way to remove one from the batch, and the
    function tells requests apart by their position in it.
    """

    def __init__(self, function: UserFunction, adapters: AdapterFunctions, size: int) -> None:
        self._function = function
        self._adapters = adapters
        self._size = size
        self._waiting: list[_RunningRequest] = []
        self._running: list[_RunningRequest] = []
        self._reset = False
        self._wake: asyncio.Event
        self._stepping: asyncio.Task[None]

    async def start(self) -> None:
        self._function.check_loaded(self._function.load())
        self._wake = asyncio.Event()
        self._stepping = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._stepping.cancel()
        await asyncio.wait([self._stepping])

    async def add_adapter(self, adapter: Adapter) -> str:
        return self._adapters.add(adapter)

    async def remove_adapter(self, name: str) -> str:
        return self._adapters.remove(name)

    async def handle(self, request: Request) -> Response:
        self._function.inputs.content(request)  # raises RequestError here, where only this request fails
        running = _RunningRequest(request)
        self._waiting.append(running)
        self._wake.set()
        step = await running.steps.get()
        while not step.data and not step.last:
            step = await running.steps.get()
        if step.failure is not None:
            raise step.failure
        headers = headers_of(step.headers)
        if step.error is not None:
            return step_error(step.error, step.code) if step.of_all else piece_error(step.error, step.code, headers)
        if step.last:
            return Response(headers=headers, data=step.data.encode())
        return Response(headers=headers, stream=_rest(step, running))

    async def _run(self) -> None:
        while True:
            self._admit()
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                self._step()
            except EXITS:
                await asyncio.sleep(0)  # the exception ends the event loop; every request takes its ending first
                raise
            await asyncio.sleep(0)  # the step holds the event loop, so requests arrive and leave only here

    def _admit(self) -> None:
        room = self._size - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]

    def _step(self) -> None:
        running = self._running
        batch = self._batch()
        try:
            steps = list(_steps(self._function.call(batch), len(running)))
        except HandlerError as error:
            logger.error("a step of the rolling batch failed: %s", error.message)
            self._end_all(error.message, error.code or FAILED)
            return
        except EXITS as error:
            self._end_all("", failure=WorkerDiedError(exit_message(error)))
            raise
        except BaseException as error:  # the border to the user's code; every running request ends with it
            logger.exception(
                "a step of the rolling batch raised: %s", format_user_error(error, self._function.model_dir)
            )
            # LMI reports no cause. An exception that is no Exception is rare enough to name it.
            reason = _RAISED if isinstance(error, Exception) else f"{_RAISED}: {describe(error)}"
            self._end_all(reason, OUT_OF_MEMORY if is_out_of_memory(error) else FAILED)
            return
        for one, step in zip(running, steps, strict=True):
            one.is_new = False
            one.steps.put_nowait(step)
        self._running = [one for one, step in zip(running, steps, strict=True) if not step.last]

    def _end_all(self, error: str, code: int = FAILED, failure: LmiServerError | None = None) -> None:
        """End every running request, and have the next step tell the function to forget them.

        After a failed step it is unknown which requests the function still holds, so the batch starts anew.
        """
        for one in self._running:
            one.steps.put_nowait(_Step("", True, {}, error, code, failure, of_all=True))
        self._running = []
        self._reset = True

    def _batch(self) -> Input:
        properties: dict[str, Any] = dict(self._function.inputs.common)
        content: list[tuple[str, bytes]] = []
        for index, one in enumerate(self._running):
            prefix = f"batch_{index:03d}."
            if not one.is_new:  # LMI's contract: a request in full in its first step, then only its place in the batch
                content.append((prefix + "data", b""))
                continue
            properties |= {prefix + name: value for name, value in sent_properties(one.request).items()}
            # LMI hands over the body alone, a form as it is. Of the query only the adapter is handed over.
            content += [(prefix + key, value) for key, value in one.request.content if key == ADAPTER]
            content.append((prefix + "data", one.request.body()))
            content.append((prefix + "seed", str(random.randrange(_SEEDS)).encode()))
        properties["batch_size"] = str(len(self._running))
        if self._reset:
            properties["reset_rollingbatch"] = "true"
            self._reset = False
        return make_input(properties, content, properties["handler"])


async def _rest(first: _Step, running: _RunningRequest) -> AsyncGenerator[bytes, None]:
    step = first
    while True:
        if step.failure is not None:
            raise step.failure
        if step.error is not None:
            raise HandlerError(step.error, step.code)
        yield step.data.encode()
        if step.last:
            return
        step = await running.steps.get()


def _steps(output: Any, count: int) -> Iterator[_Step]:
    """Yield the result of each running request. Raises HandlerError if `output` has not exactly one for each."""
    if not isinstance(output, Output):
        raise HandlerError(f"Invalid output type: {type(output)}")
    if output.code != 200:
        raise HandlerError(f"{STEP_FAILED}: {output.message}", output.code if output.code >= 400 else FAILED)
    if output.content.size() != count:
        raise HandlerError(f"{STEP_FAILED}: {output.content.size()} results for {count} requests")
    headers = in_batch(output.properties, count)
    for value, own in zip(output.content.values, headers, strict=True):
        yield _step(bytes(value), own)


def _step(value: bytes, headers: dict[str, Any]) -> _Step:
    if value.startswith(b"{"):  # code for LMI 0.26 and older answers in JSON
        fields = {key: str(found) for key, found in json.loads(value).items()}
    else:
        fields = Output.binary_decode(value)
    error = fields.get("error")
    failed = error is not None or fields.get("code", "200") != "200"
    if "content_type" in fields:
        headers.setdefault("Content-Type", fields["content_type"])
    return _Step(
        data=fields.get("data", ""),
        last=failed or fields.get("last", "").lower() == "true",
        headers=headers,
        error=(error or "") if failed else None,
        code=int(fields.get("code", FAILED)),
    )
