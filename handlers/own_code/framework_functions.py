"""Serves with the functions of a script for SageMaker's framework containers (PyTorch, Hugging Face, scikit-learn).

The functions and their parameters are those of the SageMaker Inference Toolkit: `model_fn(model_dir)`,
`input_fn(data, content_type)`, `predict_fn(data, model)` and `output_fn(prediction, accept)`, or in place of the last
three `transform_fn(model, data, content_type, accept)`. Each may take a context as one more parameter.
"""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from djl_python.inputs import Input
from djl_python.outputs import Output

from lmi_server.contract.errors import ModelLoadError

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
_TEXTS = (JSON, CSV)  # what functions get as str, as in the toolkit
_UNSUPPORTED = 415
_NOT_ACCEPTABLE = 406


class Context:
    """What a function may take as its last parameter, by the names of the toolkit. It is that of one call."""

    def __init__(self, model_dir: str, headers: Mapping[str, str]) -> None:
        self.system_properties = {"model_dir": model_dir, "gpu_id": None}
        self.response_content_type: str | None = None
        self.response_headers: dict[str, str] = {}
        self._headers = headers

    def get_request_header(self, index: int, key: str) -> str | None:
        """Return a header of the request; there is one request to a call, with the index 0."""
        return self._headers.get(key.lower())

    def get_all_request_header(self, index: int) -> dict[str, str]:
        """Return all headers of the request, by their names in lower case."""
        return dict(self._headers)

    def set_response_content_type(self, index: int, value: str) -> None:
        """Set the content type of the answer."""
        self.response_content_type = value

    def set_response_header(self, index: int, key: str, value: str) -> None:
        """Set a header of the answer."""
        self.response_headers[key] = value


class Script:
    """The functions of a script, by name, as one function of LMI's contract."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], default_accept: str, place: str) -> None:
        """`default_accept` is the content type for requests that accept any; `place` is the file, for messages."""
        self._functions = functions
        self._default_accept = default_accept
        self._place = place
        self._model: Any = None
        self._model_dir = ""

    def __call__(self, inputs: Input) -> Output | None:
        if inputs.is_empty():
            self._load(inputs)
            return None
        headers = {name.lower(): value for name, value in inputs.get_properties().items()}
        kind = headers.get("content-type", JSON)
        accept = headers.get("accept", "*/*")
        accept = self._default_accept if accept in ("", "*/*") else accept
        context = Context(self._model_dir, headers)
        body = bytes(inputs.get_as_bytes())
        data = body.decode() if _is_text(kind) else body
        try:
            result, kind = self._answer(data, kind, accept, context)
        except _UnsupportedError as error:
            return Output().error(str(error), code=error.status, message=str(error))
        output = Output().add(result).add_property("Content-Type", context.response_content_type or kind)
        for name, value in context.response_headers.items():
            output.add_property(name, value)
        return output

    def _load(self, inputs: Input) -> None:
        self._model_dir = inputs.get_properties()["model_dir"]
        load = self._functions.get("model_fn")
        if load is None:
            raise ModelLoadError(f"{self._place}: defines no model_fn(model_dir), which loads the model; define it")
        self._model = _call(load, (self._model_dir,), Context(self._model_dir, {}))

    def _answer(self, data: Any, kind: str, accept: str, context: Context) -> tuple[Any, str]:
        functions = self._functions
        if "transform_fn" in functions:
            result = _call(functions["transform_fn"], (self._model, data, kind, accept), context)
            return _with_type(result, accept)
        read = functions.get("input_fn")
        value = decoded(data, kind) if read is None else _call(read, (data, kind), context)
        predict = functions.get("predict_fn")
        prediction = self._model(value) if predict is None else _call(predict, (value, self._model), context)
        write = functions.get("output_fn")
        if write is None:
            return encoded(prediction, accept)
        return _with_type(_call(write, (prediction, accept), context), accept)


class _UnsupportedError(Exception):
    """A content type that the functions of the toolkit's own cannot read or write."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def decoded(data: Any, kind: str) -> Any:
    """Return what the toolkit makes of a body if there is no input_fn."""
    match _plain(kind):
        case "application/json":
            return json.loads(data)
        case "text/csv":
            import numpy as np

            return np.genfromtxt(io.StringIO(data), delimiter=",")
        case "application/x-npy":
            import numpy as np

            return np.load(io.BytesIO(data), allow_pickle=False)
    raise _UnsupportedError(_UNSUPPORTED, f"content-type {kind}: send {JSON}, {CSV} or {NPY}, or define input_fn")


def encoded(prediction: Any, accept: str) -> tuple[Any, str]:
    """Return body and content type that the toolkit makes of a prediction if there is no output_fn."""
    kinds = [_plain(kind) for kind in accept.split(",")]
    if JSON in kinds or "*/*" in kinds:
        return json.dumps(prediction, default=_as_list), JSON
    import numpy as np

    array = np.array(_as_list(prediction) if hasattr(prediction, "tolist") else prediction)
    if CSV in kinds:
        text = io.StringIO()
        np.savetxt(text, array, delimiter=",", fmt="%s")
        return text.getvalue(), CSV
    if NPY in kinds:
        data = io.BytesIO()
        np.save(data, array)
        return data.getvalue(), NPY
    raise _UnsupportedError(_NOT_ACCEPTABLE, f"accept {accept}: ask for {JSON}, {CSV} or {NPY}, or define output_fn")


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], context: Context) -> Any:
    """Call a function, with the context if it takes one parameter more."""
    try:
        inspect.signature(function).bind(*arguments, context)
    except TypeError:
        return function(*arguments)
    except ValueError:  # a function of C, whose parameters nobody knows
        return function(*arguments)
    return function(*arguments, context)


def _with_type(result: Any, accept: str) -> tuple[Any, str]:
    """Return body and content type of what a function returns: a body, or both."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    return result, accept


def _as_list(value: Any) -> Any:
    """Return an array or a tensor as a list. Raises TypeError for anything else."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} has no form in JSON; define output_fn")
    return value.tolist()


def _is_text(kind: str) -> bool:
    return _plain(kind) in _TEXTS


def _plain(kind: str) -> str:
    return kind.partition(";")[0].strip().lower()
