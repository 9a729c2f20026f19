"""A model.py beside a built-in handler for text generation: its formatters read requests and write answers."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from djl_python.request_io import RequestInput, TextInput

from handlers.own_code.djl.inputs import InputBuilder
from handlers.own_code.output_formatters import exchange_writer
from handlers.user_code import DEFAULT_ENTRY_POINT, find_marked, format_user_error, load_file
from lmi_server import dialects
from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import HandlerError, LmiServerError, ModelLoadError, describe
from lmi_server.contract.protocol import Input as Request
from lmi_server.dialects import fields, lmi
from lmi_server.dialects.base import Exchange, Formatting, ServedModel
from lmi_server.dialects.routes import LMI_ROUTES

logger = logging.getLogger(__name__)

_INPUT, _OUTPUT = "input_formatter", "output_formatter"
_LMI_BODY = "decoded_payload"  # LMI's documentation gives a body this name and no type
_WITHOUT_EFFECT = ("prediction_handler", "init_handler")
# Arguments of LMI's input formatters without a counterpart here; they are None.
_ABSENT = ("adapter_registry", "model_config", "peft_config", "rolling_batch", "image_placeholder_token")


def load_formatting(
    model_dir: str, options: ModelOptions, tokenizer: Callable[[], Any], base: OwnFormatting | None = None
) -> OwnFormatting | None:
    """Return the formatters of the model.py in `model_dir`; `base` if there are none.

    `tokenizer` returns the tokenizer of the loaded model. If `model_dir` is the directory of an adapter, `base` has the
    formatters of the model, which apply unless the adapter has its own of the same kind. Raises ModelLoadError with
    file and line.
    """
    code = _Code(Path(model_dir, DEFAULT_ENTRY_POINT))
    reads = code.find_function("option.input_formatter", options.input_formatter, base is None) or code.marked.get(
        _INPUT
    )
    if options.output_formatter in lmi.FORMATTER_NAMES:
        writes = None
    else:
        named = code.find_function("option.output_formatter", options.output_formatter, base is None)
        writes = named or code.marked.get(_OUTPUT)
    for function in (reads, writes):
        if function is not None and (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            raise ModelLoadError(f"{_place(function)}: a formatter is an ordinary function; write it without async")
    if reads is None and writes is None:
        return base
    if base is not None:
        reads, writes = reads or base.reads, writes or base.writes
    return OwnFormatting(reads, writes, options, tokenizer, model_dir)


class _Code:
    """A model.py, which may be missing; `marked` has the functions with a decorator, by its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._module = _load(path)
        self.marked = {} if self._module is None else find_marked(self._module, (_INPUT, _OUTPUT, *_WITHOUT_EFFECT))
        for name in _WITHOUT_EFFECT:
            if name in self.marked:
                logger.warning("%s: @%s has no effect beside a model that generates text", path.parent, name)

    def find_function(self, key: str, name: str | None, required: bool) -> Callable[..., Any] | None:
        """Return the function that an option names. Raises ModelLoadError if it is missing and `required`."""
        if name is None:
            return None
        function = getattr(self._module, name, None)
        if callable(function):
            return function  # type: ignore[no-any-return]
        if not required:
            return None
        known = ", ".join(lmi.FORMATTER_NAMES)
        missing = "does not define it" if self._module is not None else "does not exist"
        raise ModelLoadError(f'{key} = "{name}": {self._path} {missing}; allowed: a function of model.py, or {known}')


def _load(path: Path) -> ModuleType | None:
    if not path.is_file():
        return None
    try:
        return load_file(path)
    except BaseException as error:  # the border to the user's code
        raise ModelLoadError(f"{path} cannot be imported: {format_user_error(error, str(path.parent))}") from error


class OwnFormatting(Formatting):
    """Reads requests with `reads` and writes answers with `writes`; if one is None, the dialects do its part.

    An input formatter that takes an Input serves LMI's paths only, as every output formatter does. One that takes the
    body (a dict) serves OpenAI's paths, too.
    """

    def __init__(
        self,
        reads: Callable[..., Any] | None,
        writes: Callable[..., Any] | None,
        options: ModelOptions,
        tokenizer: Callable[[], Any],
        model_dir: str,
    ) -> None:
        self.reads = reads
        self.writes = writes
        self._takes_body = reads is not None and _takes_body(reads)
        self._written = exchange_writer(_without_exits(writes)) if writes is not None else None
        self._options = options
        self._tokenizer = tokenizer
        self._requests = InputBuilder("handle", {"model_dir": model_dir}, may_choose_handler=True)
        self._model_dir = model_dir
        self._numbers = itertools.count()  # LMI numbers its requests, and some functions tell them apart by the number

    def parse(self, request: Request, served: ServedModel) -> Exchange:
        is_lmi = request.route in LMI_ROUTES
        text_input: RequestInput | None = None
        if self.reads is not None and self._takes_body:
            request = self._format_body(request)
        elif self.reads is not None and is_lmi:
            read = self._call(self.reads, self._requests.one(request))
            if isinstance(read, RequestInput):
                text_input = read
                request = _with_body(request, _body_of(read))
            else:
                request = _with_body(request, _check_body(read, "TextInput or a dict"))
        # The result of a formatter becomes a body of the dialect again, for one parser to validate all requests.
        exchange = dialects.parse(request, served)
        if self._written is None or not is_lmi:
            return exchange
        text_input = text_input or _input_of(request)
        self._complete(text_input, request)
        return self._written(exchange, text_input, _streams(text_input), served)

    def _format_body(self, request: Request) -> Request:
        assert self.reads is not None
        return _with_body(request, _check_body(self._call(self.reads, fields.json_object(request)), "a dict"))

    def _call(self, function: Callable[..., Any], value: Any) -> Any:
        more = {
            **dict.fromkeys(_ABSENT),
            "configs": self._options,
            "tokenizer": self._tokenizer(),
            "is_rolling_batch": True,
            "is_mistral_tokenizer": False,
        }
        try:
            return function(value, **_accepted_arguments(function, more))
        except LmiServerError:
            raise
        except BaseException as error:  # exits, too: a formatter does not end the process of the model
            raise HandlerError(f"input_formatter: {format_user_error(error, self._model_dir)}") from error

    def _complete(self, text_input: RequestInput, request: Request) -> None:
        """Set the fields that only the server knows, as LMI does after the formatter."""
        text_input.request_id = next(self._numbers)
        text_input.client_request_id = request.request_id or None
        text_input.server_parameters = text_input.server_parameters or dict(text_input.parameters)
        text_input.tgi_compat = self._options.tgi_compat
        if isinstance(text_input, TextInput) and text_input.tokenizer is None:
            text_input.tokenizer = self._tokenizer()


def _takes_body(function: Callable[..., Any]) -> bool:
    """Return whether an input formatter takes the body as a dict, by the annotations of its argument or result."""
    signature = _signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.annotation is not inspect.Parameter.empty:
        return _says(first.annotation, dict, "dict", "Dict", "Mapping")
    if first is not None and first.name == _LMI_BODY:
        return True
    return _says(signature.return_annotation, dict, "dict", "Dict", "Mapping")


def _says(annotation: Any, kind: type, *names: str) -> bool:
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] in names
    return annotation is kind or getattr(annotation, "__origin__", None) is kind


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # a callable without a signature
        raise ModelLoadError(f"{function!r} cannot be a formatter: {error}") from error


def _without_exits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its exits turned into errors: a formatter does not end the process of the model."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception:
            raise
        except BaseException as error:
            raise HandlerError(f"output_formatter: {describe(error)}") from error

    return call


def _accepted_arguments(function: Callable[..., Any], more: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(more)
    return {name: value for name, value in more.items() if name in list(parameters)[1:]}


def _check_body(value: Any, wanted: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise HandlerError(f"input_formatter returned a {type(value).__name__}; it has to return {wanted}")
    return value


def _with_body(request: Request, body: Mapping[str, Any]) -> Request:
    try:
        data = msgspec.json.encode(body)
    except (TypeError, ValueError) as error:
        raise HandlerError(f"input_formatter returned a value that JSON cannot express: {error}") from error
    properties = {**request.properties, "content-type": "application/json"}
    content = [(key, value) for key, value in request.content if key != "data"]
    return msgspec.structs.replace(request, properties=properties, content=[*content, ("data", data)])


def _body_of(read: RequestInput) -> dict[str, Any]:
    """Return the body, in LMI's form, of the request that an input formatter returned."""
    parameters = {name: value for name, value in read.parameters.items() if name != "stream"}
    body = {"inputs": getattr(read, "input_text", None), "parameters": parameters, "stream": _streams(read)}
    adapters = getattr(read, "adapters", None)
    return body if adapters is None else {**body, "adapters": adapters}


def _input_of(request: Request) -> TextInput:
    """Return a request without an input formatter in the form for output formatters."""
    if fields.media_type(request) == "text/plain":
        return TextInput(parameters={"stream": False}, input_text=fields.plain_text(request))
    body = fields.json_object(request)
    parameters = body.get("parameters") or {}
    parameters = {**parameters, "stream": body.get("stream") or False}
    text = body.get("inputs") or body.get("prompt")
    return TextInput(parameters=parameters, input_text=text, adapters=body.get("adapters"))


def _streams(read: RequestInput) -> bool:
    return read.parameters.get("stream") in (True, "true")


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
