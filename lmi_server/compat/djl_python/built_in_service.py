"""Runs a built-in handler of the server inside a model.py, for code that calls or subclasses a service of LMI's.

The handler is chosen and configured as `option.entryPoint` would do it. It runs in the process of the code and takes
whole requests, or batches of them. The server's packages are imported when a service is initialized.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from djl_python.inputs import Input
from djl_python.outputs import Output

if TYPE_CHECKING:
    from lmi_server.configuration.resolve import ResolvedModel
    from lmi_server.contract.errors import LmiServerError
    from lmi_server.contract.handler import RequestHandler, Response
    from lmi_server.contract.protocol import Input as Request

logger = logging.getLogger(__name__)

# Properties that the server sets for the code, or this module for the handler.
_NOT_OPTIONS = frozenset(
    {"cluster_size", "device_id", "engine", "entryPoint", "handler", "model_dir", "mpi_mode", "rolling_batch"}
)


class BuiltInService:
    """The base of the services: `entry_point` is the value of option.entryPoint that means the same handler.

    `not_called` are methods and attributes of LMI's class that nothing here calls or sets. `attributes` are the
    handler's.
    """

    entry_point: ClassVar[str]
    not_called: ClassVar[frozenset[str]] = frozenset()
    attributes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in sorted(cls.__dict__.keys() & cls.not_called):
            raise TypeError(
                f"{cls.__name__}.{name} would never be called, because the built-in handler of this server runs the "
                f"model; override initialize() or inference(), or call what you need from handle() in model.py"
            )

    def __init__(self) -> None:
        self.initialized = False
        self._handler: RequestHandler | None = None

    def __getattr__(self, name: str) -> Any:
        if name in self.attributes and self.__dict__.get("_handler") is None:
            return None  # as in LMI before initialize()
        known = ", ".join(("initialize", "inference", *self.attributes))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; it has {known}")

    def initialize(self, properties: Mapping[str, Any]) -> None:
        """Load the model that the properties of the first call describe.

        Raises ConfigurationError for a wrong value, ModelLoadError if the model cannot be loaded, and ValueError with
        a rolling batch, which only the server itself steps.
        """
        self._handler = self._start(properties)
        self.initialized = True

    def inference(self, inputs: Input) -> Output:
        """Return the answer to a request, or to a batch of them. Raises what the handler refuses a request with."""
        if self._handler is None:
            raise RuntimeError(f"{type(self).__name__}: call initialize(properties) before inference()")
        outcomes = self._handler.handle([_request(item) for item in inputs.get_batches()])
        return _answers(outcomes) if inputs.is_batch() else _answer(outcomes[0])

    def batching_remedy(self) -> str:
        """Return the end of the message to a user who asks for a rolling batch."""
        return ""

    def _start(self, properties: Mapping[str, Any]) -> RequestHandler:
        from lmi_server.configuration.handlers import load
        from lmi_server.contract.handler import RequestHandler
        from lmi_server.machine.environment import set_variables

        self._check_batching(properties)
        self._check_ranks(properties)
        model = self._resolve(properties)
        set_variables(model.worker_environment)
        made = cast("type[RequestHandler]", load(model.handler))()
        assert isinstance(made, RequestHandler), "without a rolling batch no handler decodes token by token"
        made.served_names = model.served_names
        made.start(model.model_dir, model.options)
        return made

    def _resolve(self, properties: Mapping[str, Any]) -> ResolvedModel:
        from lmi_server.configuration.model_directory.model_code import MODEL_CODE
        from lmi_server.configuration.resolve import resolve_model
        from lmi_server.machine.environment import process_environment

        options = {**_options(properties), "option.entryPoint": self.entry_point, "option.rolling_batch": "disable"}
        # A worker runs in the directory of its model; tests of a module may name none.
        model = resolve_model(Path(properties.get("model_dir") or "."), process_environment(), options)
        for warning in model.warnings:
            if MODEL_CODE not in warning:  # a handle() is not without effect here
                logger.warning("%s", warning)
        return model

    def _check_batching(self, properties: Mapping[str, Any]) -> None:
        rolling = str(properties.get("rolling_batch", "disable"))
        if rolling.lower() != "disable":
            raise ValueError(
                f"option.rolling_batch={rolling}: in a model.py {type(self).__name__} answers whole requests; set "
                f"option.rolling_batch=disable{self.batching_remedy()}"
            )

    def _check_ranks(self, properties: Mapping[str, Any]) -> None:
        from lmi_server.machine.environment import own_rank

        if own_rank().size > 1 or str(properties.get("mpi_mode")).lower() == "true":
            raise ValueError(
                f"in a model.py {type(self).__name__} runs in one process; set engine=Python and no option.mpi_mode"
                f"{self.batching_remedy()}"
            )


def handle_with(service: BuiltInService, inputs: Input) -> Output | None:
    """Do what the function `handle` of LMI's module does: load the model first, and answer nothing to an empty call."""
    if not service.initialized:
        service.initialize(inputs.get_properties())
    return None if inputs.is_empty() else service.inference(inputs)


def _options(properties: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties that configure the handler, by key in full."""
    from lmi_server.configuration.handlers import HANDLERS, load_options_type
    from lmi_server.configuration.layers import spellings

    # Keys that no handler knows are the code's own.
    known = {key for spec in HANDLERS for key in spellings(load_options_type(spec).declared_options())}
    given = {f"option.{name}": value for name, value in properties.items() if name not in _NOT_OPTIONS}
    return {key: str(value) for key, value in given.items() if key in known and isinstance(value, str | int | float)}


def _request(item: Input) -> Request:
    from lmi_server.contract.protocol import Input as Request
    from lmi_server.dialects.routes import INVOCATIONS

    properties = {name.lower(): str(value) for name, value in item.get_properties().items()}
    pairs = zip(item.content.keys, item.content.values, strict=True)
    content = [("data" if key is None else key, bytes(value)) for key, value in pairs]
    return Request(INVOCATIONS, properties, content, properties.get("requestid", ""))


def _answer(outcome: Response | LmiServerError) -> Output:
    from lmi_server.contract.errors import LmiServerError

    if isinstance(outcome, LmiServerError):
        raise outcome
    output = Output(outcome.status, outcome.reason or "OK")
    for name, value in outcome.headers:
        output.add_property(name.title(), value)
    if outcome.after is not None:
        output.finalize(outcome.after)
    if outcome.stream is not None:
        return output.add_stream_content(iter(outcome.stream), None)  # type: ignore[arg-type]
    return output.add(outcome.data, key="data")


def _answers(outcomes: Sequence[Response | LmiServerError]) -> Output:
    """Return one Output for a batch; a refused request has its own error."""
    from lmi_server.contract.errors import LmiServerError
    from lmi_server.dialects.errors import error_reply
    from lmi_server.dialects.routes import INVOCATIONS

    output = Output()
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, LmiServerError):
            status = error_reply(INVOCATIONS, outcome)[0]
            output.error(outcome.message, status, batch_index=index)
            continue
        for name, value in outcome.headers:
            output.add_property(f"batch_{index}_{name.title()}", value)
        data = outcome.data if outcome.stream is None else b"".join(outcome.stream)  # type: ignore[arg-type]
        output.add(data, key="data", batch_index=index)
    return output
