"""Parameters of requests, and helpers for code that batches itself, under LMI's names."""

from __future__ import annotations

import glob
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from djl_python.inputs import Input
from djl_python.outputs import Output

F = TypeVar("F", bound=Callable[..., Any])

SAGEMAKER_SIGNATURES = {
    "model_fn": [["model_dir"]],
    "input_fn": [["request_body", "content_type"], ["request_body", "request_content_type"]],
    "predict_fn": [["input_data", "model"]],
    "output_fn": [["prediction", "accept"], ["prediction", "response_content_type"]],
}
"""The names of the arguments of SageMaker's functions, by function."""


class IdCounter:
    """Counts up the ids of requests."""

    MAX_ID = 999999

    def __init__(self) -> None:
        self.id = 0

    def get_id(self) -> int:
        """Return the id that `next_id` will return."""
        return self.id

    def next_id(self) -> int:
        given = self.id
        self.id = (given + 1) % self.MAX_ID
        return given

    def reset(self) -> None:
        self.id = 0


def profile_objects(func: F) -> F:
    """Return `func`. LMI's decorator can count objects; Python's tracemalloc does that here."""
    return func


def is_best_of(parameters: Mapping[str, Any]) -> bool:
    return parameters.get("best_of", 0) > 1


def is_beam_search(parameters: Mapping[str, Any]) -> bool:
    return parameters.get("num_beams", 0) > 1


def is_multiple_sequences(parameters: Mapping[str, Any]) -> bool:
    return parameters.get("n", 0) > 1


def is_streaming(parameters: Mapping[str, Any]) -> bool:
    return bool(parameters.get("stream"))


def wait_till_generation_finished(parameters: Mapping[str, Any]) -> bool:
    """Return whether the answer to a request is known at its end only, because its sequences are compared then."""
    return is_best_of(parameters) or is_multiple_sequences(parameters) or is_beam_search(parameters)


def rolling_batch_inference(parsed_input: Any, inputs: Input, outputs: Output, rolling_batch: Any) -> Output:
    """Do one step of `rolling_batch` with the new requests of a ParsedInput, and add each result to `outputs`."""
    if inputs.get_property("reset_rollingbatch"):
        rolling_batch.reset()
    results = iter(rolling_batch.inference(parsed_input.requests))
    for index in range(len(parsed_input.batch)):
        error = parsed_input.errors.get(index)
        step = next(results) if error is None else {"data": "", "last": True, "code": 424, "error": error}
        outputs.add(Output.binary_encode(step), key="data", batch_index=index)
        content_type = "application/json" if error is not None else step.get("content_type")
        if content_type is not None:
            outputs.add_property(f"batch_{index}_Content-Type", content_type)
        if step.get("request_id") is not None:
            outputs.add_property(f"batch_{index}_requestId", step["request_id"])
    return outputs


def get_input_details(
    requests: Sequence[Any], errors: Mapping[int, str], batch: Sequence[Input]
) -> tuple[list[Any], list[int], dict[str, Any], list[Any] | None]:
    """Return the inputs of a batch, how many each request has, and the parameters and adapters that they share.

    Raises ValueError if the requests have different parameters.
    """
    parameters = requests[0].request_input.server_parameters
    texts: list[Any] = []
    sizes: list[int] = []
    adapters: list[Any] = []
    given = iter(requests)
    for index in range(len(batch)):
        if index in errors:
            sizes.append(0)
            continue
        request = next(given).request_input
        if request.server_parameters != parameters:
            raise ValueError("the requests of a dynamic batch must have the same parameters; set batch_size=1")
        if not isinstance(request.input_text, list):
            request.input_text = [request.input_text]
        texts += request.input_text
        sizes.append(len(request.input_text))
        adapters += request.adapters or []
    return texts, sizes, parameters, adapters or None


def find_model_file(model_dir: str, extensions: Sequence[str]) -> str | None:
    """Return the file in `model_dir` with one of `extensions` (without the dot); None if there is none.

    Raises ValueError if there are several.
    """
    found = [path for extension in extensions for path in glob.glob(os.path.join(model_dir, f"*.{extension}"))]
    if len(found) > 1:
        raise ValueError(f"{model_dir} has several model files: {', '.join(found)}; leave one of them there")
    return found[0] if found else None


def get_sagemaker_function(model_dir: str, func_name: str) -> Callable[..., Any] | None:
    """Return one of SageMaker's functions in the model.py of `model_dir`, if its arguments have SageMaker's names."""
    loader = importlib.import_module("djl_python.service_loader")
    if not os.path.isfile(os.path.join(model_dir, "model.py")):
        return None
    function = getattr(loader.load_model_service(model_dir, "model.py", "-1").module, func_name, None)
    known = SAGEMAKER_SIGNATURES.get(func_name, [])
    return function if callable(function) and list(inspect.signature(function).parameters) in known else None
