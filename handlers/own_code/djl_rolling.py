"""Calls a function that batches itself: once per step, with all live requests, each in full only the first time."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any, NamedTuple

from djl_python.inputs import Input, make_input
from djl_python.outputs import Output

from handlers.own_code.djl_adapters import AdapterFunctions
from handlers.own_code.djl_inputs import content_of
from handlers.own_code.djl_outputs import headers_of, in_batch, piece_error
from handlers.own_code.user_function import UserFunction
from handlers.user_code import format_user_error
from lmi_server.contract.errors import EXITS, HandlerError, LmiServerError, WorkerDiedError, exit_message
from lmi_server.contract.handler import AsyncRequestHandler, Response
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.protocol import Input as Request

logger = logging.getLogger(__name__)

_STEP_FAILED = "exception occurred during rolling batch inference"
_BATCH_FAILED = "Batch inference failed"
_SEEDS = 1 << 31


class _Step(NamedTuple):
    """What one step says of one request."""

    data: str
    last: bool
    headers: dict[str, Any]
    error: str | None = None
    code: int = 424
    failure: LmiServerError | None = None


class _Live:
    """A request that the function knows, or will know at the next step."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_new = True
        self.steps: asyncio.Queue[_Step] = asyncio.Queue()


class RollingFunction(AsyncRequestHandler):
    """Steps as long as there are live requests, at most `size` of them.

    The contract has no word for a request whose client is gone, and the function counts on its order: so it goes on to
    its end, and keeps its place.
    """

    def __init__(self, function: UserFunction, adapters: AdapterFunctions, size: int) -> None:
        self._function = function
        self._adapters = adapters
        self._size = size
        self._waiting: list[_Live] = []
        self._live: list[_Live] = []
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
        self._function.inputs.content(request)  # raises what is wrong with the request
        live = _Live(request)
        self._waiting.append(live)
        self._wake.set()
        step = await live.steps.get()
        while not step.data and not step.last:
            step = await live.steps.get()
        if step.failure is not None:
            raise step.failure
        if step.error is not None:
            return piece_error(step.error, step.code)
        headers = headers_of(step.headers)
        if step.last:
            return Response(headers=headers, data=step.data.encode())
        return Response(headers=headers, stream=_rest(step, live))

    async def _run(self) -> None:
        while True:
            self._admit()
            if not self._live:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                self._step()
            except EXITS:
                await asyncio.sleep(0)  # the event loop ends with it: every live request takes its ending first
                raise
            await asyncio.sleep(0)

    def _admit(self) -> None:
        room = self._size - len(self._live)
        self._live += self._waiting[:room]
        del self._waiting[:room]

    def _step(self) -> None:
        live = self._live
        batch = self._batch()
        try:
            steps = list(_steps(self._function.call(batch), len(live)))
        except HandlerError as error:
            logger.error("a step of the rolling batch failed: %s", error.message)
            self._end_all(error.message)
            return
        except EXITS as error:
            self._end_all("", WorkerDiedError(exit_message(error)))
            raise
        except BaseException as error:  # the border to the user's code; every live request ends with it
            logger.exception(
                "a step of the rolling batch raised: %s", format_user_error(error, self._function.model_dir)
            )
            self._end_all(_STEP_FAILED)
            return
        for one, step in zip(live, steps, strict=True):
            one.is_new = False
            one.steps.put_nowait(step)
        self._live = [one for one, step in zip(live, steps, strict=True) if not step.last]

    def _end_all(self, error: str, failure: LmiServerError | None = None) -> None:
        """End every live request; the function is told to forget them all."""
        for one in self._live:
            one.steps.put_nowait(_Step("", True, {}, error, failure=failure))
        self._live = []
        self._reset = True

    def _batch(self) -> Input:
        properties: dict[str, Any] = dict(self._function.inputs.common)
        content: list[tuple[str, bytes]] = []
        for index, one in enumerate(self._live):
            prefix = f"batch_{index:03d}."
            if not one.is_new:
                content.append((prefix + "data", b""))
                continue
            properties |= {prefix + name: value for name, value in one.request.properties.items()}
            content += [(prefix + key, value) for key, value in content_of(one.request)]
            content.append((prefix + "seed", str(random.randrange(_SEEDS)).encode()))
        properties["batch_size"] = str(len(self._live))
        if self._reset:
            properties["reset_rollingbatch"] = "true"
            self._reset = False
        return make_input(properties, content, properties["handler"])


async def _rest(first: _Step, live: _Live) -> AsyncGenerator[bytes, None]:
    step = first
    while True:
        if step.failure is not None:
            raise step.failure
        if step.error is not None:
            raise HandlerError(step.error)
        yield step.data.encode()
        if step.last:
            return
        step = await live.steps.get()


def _steps(output: Any, count: int) -> Iterator[_Step]:
    """Yield what `output` says of each live request. Raises HandlerError where it does not."""
    if not isinstance(output, Output):
        raise HandlerError(f"Invalid output type: {type(output)}")
    if output.code != 200:
        raise HandlerError(f"{_BATCH_FAILED}: {output.message}")
    if output.content.size() != count:
        raise HandlerError(f"{_BATCH_FAILED}: {output.content.size()} results for {count} requests")
    headers = in_batch(output.properties, count)
    for value, own in zip(output.content.values, headers, strict=True):
        yield _step(bytes(value), own)


def _step(value: bytes, headers: dict[str, Any]) -> _Step:
    if value.startswith(b"{"):  # the form of older code
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
        code=int(fields.get("code", 424)),
    )
