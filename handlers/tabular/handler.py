"""The base of the sklearn and xgboost handlers: rows of numbers in, a prediction per row out.

A model.py may replace parts of it, with functions that djl_python's decorators mark, or with model_fn, input_fn,
predict_fn and output_fn, SageMaker's names. Marked functions disable SageMaker's.
"""

from __future__ import annotations

import csv
import io
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from handlers import content
from handlers.request_groups import GroupHandler, ParsedRequest
from handlers.user_code import find_marked, format_user_error, load_entry_point
from lmi_server.contract.errors import EXITS, HandlerError, LmiServerError, ModelLoadError, RequestError
from lmi_server.contract.handler import ModelInfo, Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields

_MARKS = ("init_handler", "input_formatter", "prediction_handler", "output_formatter")
_SAGEMAKER = ("model_fn", "input_fn", "predict_fn", "output_fn")
_KINDS = (content.JSON, content.CSV)


class TabularHandler(GroupHandler[ParsedRequest]):
    """Serves the one model file of a directory.

    `formats` are the file endings of each format; those in `safe` cannot run code when they are loaded.
    """

    formats: Mapping[str, tuple[str, ...]]
    safe: frozenset[str]

    def __init__(self) -> None:
        self._model: Any = None
        self._default = content.JSON
        self._own: Mapping[str, Callable[..., Any]] = {}
        self._model_dir = ""

    @abstractmethod
    def load(self, path: Path, model_format: str, options: Any) -> Any:
        """Load the model from its file. Raises whatever the library raises."""

    @abstractmethod
    def predict(self, model: Any, rows: Any) -> Any:
        """Return an array with a prediction per row. Raises ValueError if the rows do not fit the model."""

    def start(self, model_dir: str, options: Any) -> ModelInfo:
        self._default = options.default_accept
        self._model_dir = model_dir
        self._own = _own_functions(model_dir)
        make = self._own.get("init_handler") or self._own.get("model_fn")
        if make is not None:
            self._model = make(model_dir)
            return ModelInfo(max_model_len=0, details={"model": type(self._model).__name__})
        path, model_format = self._find(Path(options.model_id or model_dir), options)
        try:
            self._model = self.load(path, model_format, options)
        except LmiServerError:
            raise
        except Exception as error:  # the border to the library, which raises anything for a file that it cannot read
            raise ModelLoadError(f"{path}: cannot be loaded as {model_format}: {error}") from error
        return ModelInfo(max_model_len=0, details={"model": type(self._model).__name__, "file": path.name})

    @property
    def model(self) -> Any:
        """Return the model, once it is loaded: code of a model.py may use it."""
        return self._model

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        if self._own:  # the contract of these functions is one request a call
            return [self._outcome(request) for request in requests]
        return super().handle(requests)

    # --- the model's file ---

    def _find(self, directory: Path, options: Any) -> tuple[Path, str]:
        if directory.is_file():
            candidates = {directory: self._format_of(directory)}
        else:
            candidates = {path: self._format_of(path) for path in sorted(directory.iterdir()) if path.is_file()}
        wanted = options.model_format
        found = [(path, kind) for path, kind in candidates.items() if kind is not None and wanted in (None, kind)]
        endings = ", ".join(f"*{ending}" for ending in self.formats.get(wanted, sum(self.formats.values(), ())))
        if len(found) != 1:
            names = ", ".join(path.name for path, _ in found) or "none"
            raise ModelLoadError(
                f"{directory}: exactly one file {endings} is needed, found: {names}; set option.model_format"
            )
        path, kind = found[0]
        if kind not in self.safe and not options.trust_insecure_model_files:
            raise ModelLoadError(
                f"{path}: a file in the format {kind} can run code when it is loaded; save the model as "
                f"{' or '.join(sorted(self.safe))}, or set option.trust_insecure_model_files=true if you trust it"
            )
        return path, kind

    def _format_of(self, path: Path) -> str | None:
        if path.name == "config.json":
            return None
        return next((kind for kind, endings in self.formats.items() if path.suffix in endings), None)

    # --- a request at a time, for the user's functions ---

    def _outcome(self, request: Input) -> Response | LmiServerError:
        try:
            rows = self._input(request)
            predict = self._own.get("prediction_handler") or self._own.get("predict_fn") or self._predict
            return self._output(request, predict(rows, self._model))
        except LmiServerError as error:
            return error
        except EXITS:
            raise
        except BaseException as error:  # noqa: BLE001 - the border to the user's code and to the library
            return HandlerError(format_user_error(error, self._model_dir))

    def _predict(self, rows: Any, model: Any) -> Any:
        return self._predictions(rows)

    def _input(self, request: Input) -> Any:
        formatter, function = self._own.get("input_formatter"), self._own.get("input_fn")
        kind = fields.media_type(request) or content.JSON
        if formatter is not None:
            from djl_python.inputs import make_input  # which only workers have

            return formatter(make_input(request.properties, request.content, "handle"), content_type=kind)
        return rows_of(request) if function is None else function(request.body(), kind)

    def _output(self, request: Input, predictions: Any) -> Response:
        formatter, function = self._own.get("output_formatter"), self._own.get("output_fn")
        if formatter is None and function is None:
            return _response(predictions, self._accept_header(request))
        accept = self._accept(request)
        if formatter is None:
            result, kind = _sagemaker_output(function, predictions, accept)
        else:
            result = formatter(predictions)
            kind = "text/plain" if isinstance(result, str) else self._default
        data = result.encode() if isinstance(result, str) else result
        return Response(
            headers=[("content-type", kind)], data=data if isinstance(data, bytes) else content.encode_json(data)
        )

    def _accept(self, request: Input) -> str:
        """Return what the client accepts; the default type if it takes any."""
        accept = request.properties.get("accept") or self._default
        return self._default if "*" in accept else accept

    # --- many requests at a time ---

    def parse(self, request: Input) -> ParsedRequest:
        kind = self._accept_header(request)
        return ParsedRequest([rows_of(request)], lambda results: _response(results[0], kind))

    def group_of(self, call: ParsedRequest) -> Hashable:
        (rows,) = call.inputs
        return rows.shape[1:], rows.dtype.kind

    def run(self, inputs: Sequence[Any], calls: Sequence[ParsedRequest]) -> Sequence[Any]:
        """Predict the rows of all requests in one call."""
        import numpy as np

        ends = np.cumsum([len(rows) for rows in inputs])[:-1]  # where the rows of each request end
        return np.split(self._predictions(np.concatenate(inputs)), ends)

    def _predictions(self, rows: Any) -> Any:
        try:
            return self.predict(self._model, rows)
        except ValueError as error:  # both libraries raise it for rows of another width, or with text in them
            raise RequestError(f"inputs cannot be used: {error}; send rows as the model was trained on") from error
        except Exception as error:  # the border to the library
            raise HandlerError(f"{type(error).__name__}: {error}") from error

    def _accept_header(self, request: Input) -> str:
        return content.accepted_type(request, self._default, _KINDS)


def rows_of(request: Input) -> Any:
    """Return the rows of a request as an array (rows, columns) of numbers, or of objects if JSON has texts in it.

    The body is {"inputs": [[...], ...]}, the bare array, or CSV without a line of names. A single row may stand without
    the outer list. Raises RequestError.
    """
    import numpy as np

    if fields.media_type(request) == content.CSV:
        return _numbers(fields.plain_text(request))
    value = fields.json_value(request)
    if isinstance(value, dict):
        value = value.get("inputs")
    if not isinstance(value, list) or not value:
        raise RequestError('inputs is missing; send {"inputs": [[1.0, 2.0], ...]}, or the array alone')
    try:
        rows = np.array(value if isinstance(value[0], list) else [value])
        if rows.dtype.kind not in "biuf":
            rows = np.array(rows, dtype=object if _has_texts(rows) else float)
    except (ValueError, TypeError, OverflowError):  # an integer of JSON may be greater than any float64
        raise RequestError(
            "inputs: rows have different lengths, or values are no numbers; send rows of equally many numbers"
        ) from None
    if rows.ndim == 1 or not rows.size:
        raise RequestError("inputs: a row is empty; send a number per column")
    return rows


def _has_texts(rows: Any) -> bool:
    return rows.dtype.kind in "US" or any(isinstance(cell, str) for cell in rows.flat)


def _numbers(text: str) -> Any:
    import numpy as np

    try:
        lines = [line for line in csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True) if line]
        rows = np.array([[float(cell) for cell in line] for line in lines])
    except (ValueError, csv.Error) as error:
        raise RequestError(
            f"the body is no CSV of numbers: {error}; send rows of equal length without a line of names"
        ) from None
    if not rows.size:
        raise RequestError("the body is empty; send a line per row")
    return rows


def _response(predictions: Any, kind: str) -> Response:
    plain = predictions.tolist() if hasattr(predictions, "tolist") else predictions
    return content.encode_response({"predictions": plain} if kind == content.JSON else plain, kind)


def _own_functions(model_dir: str) -> Mapping[str, Callable[..., Any]]:
    """Return the functions of model.py that replace a part, by its name; marked ones disable SageMaker's."""
    if not (Path(model_dir) / "model.py").is_file():
        return {}
    module = load_entry_point("model.py", model_dir)
    return find_marked(module, _MARKS) or {
        name: getattr(module, name) for name in _SAGEMAKER if callable(getattr(module, name, None))
    }


def _sagemaker_output(function: Any, predictions: Any, accept: str) -> tuple[Any, str]:
    """Return the body and the content type that `output_fn` gives: it may return the body alone."""
    result = function(predictions, accept)
    return result if isinstance(result, tuple) else (result, accept)
