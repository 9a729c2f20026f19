"""Serves with the functions of a script for SageMaker's framework containers (PyTorch, Hugging Face, scikit-learn).

The functions and their parameters are as in the SageMaker Inference Toolkit: `model_fn(model_dir)`,
`input_fn(data, content_type)`, `predict_fn(data, model)` and `output_fn(prediction, accept)`, or in place of the last
three `transform_fn(model, data, content_type, accept)`. `pre_model_fn(model_dir)` is called before the model is loaded,
`model_warmup_fn(model_dir, model)` afterwards. Each may take a context as one more parameter.
"""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from djl_python.inputs import Input
from djl_python.outputs import Output

from handlers.own_code.script_context import Context
from lmi_server.contract.errors import ModelLoadError

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
_OF_THE_SERVER = frozenset({"cluster_size", "device_id", "handler", "model_dir", "requestId"})  # no headers
_PARTS = ("input_fn", "predict_fn", "output_fn")
_TEXTS = (JSON, CSV)  # what functions get as str, as in the toolkit
_UNSUPPORTED = 415
_NOT_ACCEPTABLE = 406


class Script:
    """The functions of a script, by name, as one function of LMI's contract."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], default_accept: str, place: str) -> None:
        """`default_accept` is the content type for requests that accept any; `place` is the file, for messages."""
        self._functions = functions
        self._default_accept = default_accept
        self._place = place
        self._model: Any = None
        self._system: dict[str, Any] = {}  # what every context has

    def __call__(self, inputs: Input) -> Output | None:
        if inputs.is_empty():
            self._load(inputs)
            return None
        properties = inputs.get_properties()
        headers = {name: value for name, value in properties.items() if name not in _OF_THE_SERVER}
        kind = inputs.get_property("content-type") or JSON
        accept = inputs.get_property("accept") or "*/*"
        accept = self._default_accept if accept == "*/*" else accept
        context = Context(self._system, headers, properties.get("requestId", ""))
        body = bytes(inputs.get_as_bytes())
        data = body.decode() if _plain(kind) in _TEXTS else body
        try:
            result, kind = self._answer(data, kind, accept, context)
        except _UnsupportedError as error:
            return Output().error(str(error), code=error.status, message=str(error))
        status, phrase = context.get_response_status(0)
        output = Output(status, phrase or "OK").add(result)
        for name, value in {"Content-Type": kind, **_with_usual_names(context.get_response_headers(0))}.items():
            output.add_property(name, value)
        return output

    def _load(self, inputs: Input) -> None:
        model_dir = inputs.get_properties()["model_dir"]
        device = int(inputs.get_property("device_id") or -1)
        self._system = {
            "model_dir": model_dir,
            "gpu_id": device if device >= 0 else None,
            "batch_size": 1,
            "server_name": "lmi-server",
            "server_version": version("lmi-server"),
        }
        context = Context(self._system, {}, "")
        load = self._functions.get("model_fn")
        if load is None:
            raise ModelLoadError(f"{self._place}: defines no model_fn(model_dir), which loads the model; define it")
        parts = [name for name in _PARTS if name in self._functions]
        if parts and "transform_fn" in self._functions:
            raise ModelLoadError(
                f"{self._place}: transform_fn does the work of {', '.join(parts)}; define one or the other"
            )
        if "pre_model_fn" in self._functions:
            _call(self._functions["pre_model_fn"], (model_dir,), context)
        self._model = _call(load, (model_dir,), context)
        if "model_warmup_fn" in self._functions:
            _call(self._functions["model_warmup_fn"], (model_dir, self._model), context)

    def _answer(self, data: Any, kind: str, accept: str, context: Context) -> tuple[Any, str]:
        functions = self._functions
        if "transform_fn" in functions:
            result = _call(functions["transform_fn"], (self._model, data, kind, accept), context)
            return _with_type(result, accept)
        read = functions.get("input_fn")
        value = decode(data, kind) if read is None else _call(read, (data, kind), context)
        predict = functions.get("predict_fn")
        prediction = self._model(value) if predict is None else _call(predict, (value, self._model), context)
        write = functions.get("output_fn")
        if write is None:
            return encode(prediction, accept)
        return _with_type(_call(write, (prediction, accept), context), accept)


class _UnsupportedError(Exception):
    """A content type that the functions of the toolkit's own cannot read or write."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def decode(data: Any, kind: str) -> Any:
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


def encode(prediction: Any, accept: str) -> tuple[Any, str]:
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
    except ValueError:  # a function of C, whose parameters are unknown
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


def _with_usual_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers of an answer; the content type under the name that Output has for it."""
    return {"Content-Type" if name.lower() == "content-type" else name: value for name, value in headers.items()}


def _plain(kind: str) -> str:
    return kind.partition(";")[0].strip().lower()
