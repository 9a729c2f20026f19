"""Serves with a function in the contract of LMI's `djl_python`: it gets an Input and returns an Output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

from djl_python.inputs import Input
from djl_python.session_manager import save_sessions

from handlers.own_code.djl.adapters import AdapterFunctions
from handlers.own_code.djl.async_functions import AsyncFunction
from handlers.own_code.djl.inputs import InputBuilder
from handlers.own_code.djl.outputs import respond, split
from handlers.own_code.djl.rolling import RollingFunction
from handlers.own_code.options import OwnCodeOptions
from handlers.own_code.user_function import UserFunction
from handlers.user_code import place_of
from lmi_server.contract.errors import EXITS, LmiServerError
from lmi_server.contract.handler import AsyncRequestHandler, ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.protocol import Input as Request
from lmi_server.machine.environment import process_environment

logger = logging.getLogger(__name__)

_MAY_CHOOSE_HANDLER = "ALLOW_REQUEST_HANDLER_OVERRIDE"


class DjlFunction(RequestHandler):
    """Calls a function in batches, or concurrently if it is asynchronous or batches its requests itself."""

    def __init__(
        self,
        function: Callable[[Input], Any],
        formatters: Mapping[str, Callable[..., Any]],
        adapter_functions: Mapping[str, Callable[[Input], Any]],
        is_script: bool = False,
    ) -> None:
        """`formatters` are functions with a decorator of djl_python; LMI hands them to the call that loads the model.

        `adapter_functions` get the LoRA adapters. `is_script`: the function is a script for SageMaker's framework
        containers, which takes one request at a time and the header of custom attributes as it came.
        """
        self._is_script = is_script
        self._callable = function
        self._formatters = formatters
        self._adapter_functions = adapter_functions
        self._adapters: AdapterFunctions
        self._function: UserFunction
        self._concurrent: AsyncRequestHandler | None = None

    def start(self, model_dir: str, options: OwnCodeOptions) -> ModelInfo:
        environment = process_environment()
        device = "0" if environment.get("CUDA_VISIBLE_DEVICES") else "-1"
        common = {"model_dir": model_dir, "device_id": device, "cluster_size": 1}
        initial = {**_properties(model_dir, options), **self._formatters, **common, "handler": options.handler}
        may_choose = environment.get(_MAY_CHOOSE_HANDLER, "").lower() == "true"
        adapters = self._adapters = AdapterFunctions(self._adapter_functions, common)
        served = adapters.registered if options.enable_lora else None
        inputs = InputBuilder(options.handler, common, may_choose, served, self._is_script)
        function = self._function = UserFunction(self._callable, inputs, initial, model_dir)
        if options.rolling_batch != "disable":
            self._concurrent = RollingFunction(function, adapters, options.max_rolling_batch_size)
        elif options.async_mode or iscoroutinefunction(self._callable) or isasyncgenfunction(self._callable):
            self._concurrent = AsyncFunction(function, adapters)
        else:
            function.check_loaded(function.load())
        return ModelInfo(max_model_len=0, details={"handler": options.handler})

    def add_adapter(self, adapter: Adapter) -> str:
        return self._adapters.add(adapter)

    def remove_adapter(self, name: str) -> str:
        return self._adapters.remove(name)

    def stop(self) -> None:
        save_sessions()

    def concurrent_handler(self) -> AsyncRequestHandler | None:
        return self._concurrent

    def handle(self, requests: Sequence[Request]) -> Sequence[Response | LmiServerError]:
        """Answer a batch with one call.

        If the call raises, the requests are repeated one by one, so that only the guilty one fails.
        """
        if len(requests) > 1 and not self._is_script:
            try:
                batch = self._function.inputs.batch(requests)
            except LmiServerError:
                return self._without_refused(requests)
            try:
                return split(self._function.call(batch), len(requests))
            except EXITS:
                raise
            except BaseException as error:  # the border to the user's code
                place = place_of(error, self._function.model_dir)
                logger.exception("%s: raised for a batch of %d requests; repeating each alone", place, len(requests))
        return [self._one(request) for request in requests]

    def _without_refused(self, requests: Sequence[Request]) -> Sequence[Response | LmiServerError]:
        """Answer a batch in which some requests are refused; the others stay together."""
        refused: dict[int, LmiServerError] = {}
        for index, request in enumerate(requests):
            try:
                self._function.inputs.content(request)
            except LmiServerError as error:
                refused[index] = error
        rest = iter(self.handle([request for index, request in enumerate(requests) if index not in refused]))
        return [refused.get(index) or next(rest) for index in range(len(requests))]

    def _one(self, request: Request) -> Response | LmiServerError:
        try:
            return respond(self._function.call(self._function.inputs.one(request)))
        except EXITS:
            raise
        except BaseException as error:  # noqa: BLE001 - the border to the user's code; `failure` logs it
            return self._function.failure(request, error)


def _properties(model_dir: str, options: OwnCodeOptions) -> dict[str, str]:
    """Return the configuration as the call that loads the model gets it."""
    given = dict(options.given)
    # The server sets model_id to the directory if no layer sets it. LMI's code takes a model_id that is
    # there as the name of weights elsewhere.
    if given.get("model_id") == model_dir:
        del given["model_id"]
    return given
