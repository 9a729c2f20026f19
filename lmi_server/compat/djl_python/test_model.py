"""Makes requests for a model.py and reads its answers, for tests of such code."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from djl_python.arg_parser import ArgParser
from djl_python.inputs import Input
from djl_python.np_util import from_nd_list, from_npz, get_int, to_nd_list, to_npz
from djl_python.outputs import Output
from djl_python.pair_list import PairList
from djl_python.service_loader import load_model_service
from lmi_server.machine.environment import process_environment

_TYPES = {
    ".json": "application/json",
    ".txt": "text/plain",
    ".gif": "image/gif",
    ".png": "image/png",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".ndlist": "tensor/ndlist",
    ".npz": "tensor/npz",
}
_FORWARDED_API = "X-Amzn-SageMaker-Forwarded-Api"


def create_request(input_files: Iterable[str], parameters: Iterable[str] | None) -> Input:
    """Return a request. An input is a file, a text, or name=file or name=text; a parameter is name=value.

    Raises ValueError for any other parameter.
    """
    request = Input()
    request.properties["device_id"] = "-1"
    for parameter in parameters or ():
        name, separator, value = parameter.partition("=")
        if not separator:
            raise ValueError(f"{parameter} is no parameter; write name=value")
        request.properties[name] = value
    for given in input_files:
        name, separator, value = given.partition("=")
        key, source = (name, value) if separator and not os.path.exists(given) else (None, given)
        request.content.add(key, _content(source))
        request.properties.setdefault("content-type", _type_of(source))
    return request


def create_json_request(json_data: Any, key: str | None = None) -> Input:
    return _request(Output._encode_json(json_data), "application/json", key)


def create_text_request(text: str, key: str | None = None) -> Input:
    return _request(text.encode(), "text/plain", key)


def create_numpy_request(list: Any, key: str | None = None) -> Input:  # noqa: A002 - LMI's name
    return _request(to_nd_list(list), "tensor/ndlist", key)


def create_npz_request(list: Any, key: str | None = None) -> Input:  # noqa: A002 - LMI's name
    return _request(to_npz(list), "tensor/npz", key)


def create_3p_request(json_data: Any, stream: bool = False, key: str | None = None) -> Input:
    request = create_json_request(json_data, key)
    request.properties[_FORWARDED_API] = "InvokeEndpointWithResponseStream" if stream else "InvokeEndpoint"
    return request


def create_concurrent_batch_request(
    inputs: Sequence[Any],
    properties: Sequence[Mapping[str, Any]] | None = None,
    serving_properties: Mapping[str, Any] | None = None,
) -> Input:
    """Return a batch of JSON bodies, each with properties of its own."""
    request = Input()
    request.properties.update(serving_properties or {})
    for index, own in enumerate(properties or ()):
        request.properties.update({f"batch_{index:03d}_{name}": value for name, value in own.items()})
    request.properties["batch_size"] = str(len(inputs))
    request.function_name = request.properties.get("handler", "handle")
    bodies = [Output._encode_json(body) for body in inputs]
    request.content = PairList([f"batch_{index:03d}_data" for index in range(len(bodies))], bodies)
    return request


def extract_output_as_input(outputs: Output) -> Input:
    """Return an answer as a request, whose methods read its content."""
    request = Input()
    request.properties.update(outputs.get_properties())
    request.content = outputs.content
    return request


def extract_output_as_bytes(outputs: Output, key: str | None = None) -> Any:
    return extract_output_as_input(outputs).get_as_bytes(key)


def extract_output_as_string(outputs: Output, key: str | None = None) -> str:
    return str(bytes(extract_output_as_bytes(outputs, key)), "utf-8")


def extract_output_as_numpy(outputs: Output, key: str | None = None) -> Any:
    return from_nd_list(extract_output_as_bytes(outputs, key))


def extract_output_as_npz(outputs: Output, key: str | None = None) -> Any:
    return from_npz(extract_output_as_bytes(outputs, key))


def retrieve_int(bytearr: bytes | bytearray, start_iter: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it."""
    return get_int(bytearr, start_iter)


def retrieve_short(bytearr: bytes | bytearray, start_iter: int) -> tuple[int, int]:
    return int.from_bytes(bytearr[start_iter : start_iter + 2], "big", signed=True), start_iter + 2


def retrieve_utf8(bytearr: bytes | bytearray, start_iter: int) -> tuple[str | None, int]:
    """Return the text at a place (None if its length is below 0), and the place after it."""
    length, begin = get_int(bytearr, start_iter)
    if length < 0:
        return None, begin
    return bytearr[begin : begin + length].decode(), begin + length


def decode_encoded_output_binary(binary: bytes | bytearray) -> dict[str, str]:
    return Output.binary_decode(binary)


def load_properties(properties_dir: str) -> dict[str, str]:
    """Return the lines `name=value` of the serving.properties in a directory, without `option.`."""
    path = os.path.join(properties_dir, "serving.properties")
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        lines = [line.strip() for line in file if "=" in line and not line.startswith(("#", "!"))]
    pairs = [line.partition("=")[::2] for line in lines]
    return {name.strip().removeprefix("option."): value.strip() for name, value in pairs}


def update_properties_with_env_vars(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add the values of HF_MODEL_ID and of variables OPTION_<NAME> for keys that are missing."""
    for variable, value in process_environment().items():
        if variable == "HF_MODEL_ID":
            kwargs.setdefault("model_id", value)
        elif variable.startswith("OPTION_"):
            key = variable.removeprefix("OPTION_").lower()
            kwargs.setdefault("entryPoint" if key == "entrypoint" else key, value)
    return kwargs


class TestHandler:
    """Calls a model.py (its module, or the name of one) as a worker does.

    `serving_properties` are the model's: those of its directory, and variables. Every call has them beside its own. A
    module of this package, such as `djl_python.huggingface`, loads its model with the first request.
    """

    __test__ = False  # pytest takes it for a test otherwise

    def __init__(self, entry_point: str | ModuleType, model_dir: str | None = None) -> None:
        directory = {} if model_dir is None else {"model_dir": model_dir}
        properties = load_properties(model_dir) if model_dir is not None else {}
        self.serving_properties: dict[str, Any] = update_properties_with_env_vars(properties) | directory
        if isinstance(entry_point, ModuleType):
            self.service: Any = entry_point
        elif model_dir is None:
            self.service = importlib.import_module(entry_point)
        else:
            self.service = load_model_service(model_dir, entry_point, "-1").module
        own = getattr(self.service, "_service", None)
        if own is not None:
            own.initialized = False  # another test may have loaded another model
            return
        first = Input()
        first.properties.update(self.serving_properties)
        self.service.handle(first)

    def inference(self, inputs: Input) -> Output:
        """Return the answer to a request."""
        for name, value in self.serving_properties.items():
            inputs.properties.setdefault(name, value)
        function = getattr(self.service, inputs.get_function_name() or "handle")
        answer: Output = function(inputs)
        return answer

    def inference_batch(
        self,
        inputs: Sequence[Any],
        properties: Sequence[Mapping[str, Any]] | None = None,
        serving_properties: Mapping[str, Any] | None = None,
    ) -> Output:
        """Return the answer to a batch of JSON bodies."""
        return self.inference(create_concurrent_batch_request(inputs, properties, serving_properties))

    def inference_rolling_batch(
        self,
        inputs: Sequence[Any],
        properties: Sequence[Mapping[str, Any]] | None = None,
        serving_properties: Mapping[str, Any] | None = None,
    ) -> dict[int, str]:
        """Step a rolling batch to its end; return the text of each request, by its index."""
        texts = dict.fromkeys(range(len(inputs)), "")
        running = list(texts)
        batch = create_concurrent_batch_request(inputs, properties, serving_properties)
        while running:
            steps = [Output.binary_decode(value) for value in self.inference(batch).content.values]
            for index, step in zip(running, steps, strict=True):
                texts[index] += _text(step)
            running = [index for index, step in zip(running, steps, strict=True) if step["last"].lower() != "true"]
            batch = create_concurrent_batch_request([""] * len(running), None, serving_properties)
        return texts


def run() -> None:
    """Send the request that the command line describes to a model.py, and print the answer."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    arguments = ArgParser.test_model_args().parse_args()
    request = create_request(arguments.input, arguments.parameters)
    handler = TestHandler(arguments.entry_point, arguments.model_dir)
    request.function_name = arguments.handler
    print(f"output: {handler.inference(request)}")


def _text(step: Mapping[str, str]) -> str:
    return json.dumps({"error": step["error"]}) if step.get("error") else step["data"]


def _request(body: bytes | bytearray, content_type: str, key: str | None) -> Input:
    request = Input()
    request.properties.update({"device_id": "-1", "content-type": content_type})
    request.content.add(key, bytearray(body))
    return request


def _content(source: str) -> bytearray:
    if not os.path.exists(source):
        return bytearray(source, "utf-8")
    with open(source, "rb") as file:
        return bytearray(file.read())


def _type_of(source: str) -> str:
    if os.path.exists(source):
        return _TYPES.get(os.path.splitext(source)[1], "application/octet-stream")
    return "application/json" if source.startswith("{") and source.endswith("}") else "text/plain"


if __name__ == "__main__":
    run()
