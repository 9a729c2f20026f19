"""Requests for text: tensors of prompts, and the generate extension. The parameters are LMI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Delta, GenerationRequest
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields, lmi
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.framing import SSE, encode
from lmi_server.dialects.kserve.route_names import V2_GENERATE_STREAM
from lmi_server.dialects.kserve.tensors import InferRequest, Tensor, answer, read
from lmi_server.dialects.parameters.choices import CHOICES
from lmi_server.dialects.routes import GENERATE

PROMPTS = ("text_input", "prompt")
OUTPUT = "text_output"
# Inputs of Triton's backends for language models that LMI's parameters name differently.
_NAMES = {"stop_words": "stop"}


def parse_infer(request: Input, served: ServedModel) -> Exchange:
    """Parse tensors: BYTES `text_input` (or `prompt`) with a prompt per element, other inputs as parameters.

    Raises RequestError.
    """
    infer = read(request)
    texts = [tensor for tensor in infer.inputs if tensor.name in PROMPTS]
    if not texts and len(infer.inputs) == 1:
        texts = list(infer.inputs)
    if len(texts) != 1 or texts[0].datatype != "BYTES" or not texts[0].data:
        raise RequestError('inputs: send one tensor of prompts, with the name "text_input" and the datatype BYTES')
    CHOICES(f"inputs.{texts[0].name}: the number of prompts", len(texts[0].data))
    given = {tensor.name: _one_value(tensor) for tensor in infer.inputs if tensor is not texts[0]}
    values = {**given, **infer.parameters}
    if values.pop("stream", False):
        raise RequestError("stream is not possible in this answer; post to generate_stream instead of infer")
    prompts = [_text(texts[0].name, element) for element in texts[0].data]
    return TensorExchange(infer, _generations(request, served, prompts, values), served.name)


def parse_generate(request: Input, served: ServedModel) -> Exchange:
    """Parse the generate extension: `text_input` and `parameters`, which may stand beside it. Raises RequestError."""
    body = dict(fields.json_object(request))
    identifier = body.pop("id", "")
    prompt = _text(PROMPTS[0], next((body.pop(name) for name in PROMPTS if name in body), None))
    parameters = body.pop("parameters", None) or {}
    if not isinstance(parameters, dict):
        raise fields.not_allowed("parameters", parameters, 'send an object such as {"max_tokens": 30}')
    values = {**body, **parameters}
    asked = values.pop("stream", None)
    stream = request.route == V2_GENERATE_STREAM
    if asked and not stream:
        raise RequestError("stream is not possible in this answer; post to generate_stream instead of generate")
    generations = _generations(request, served, [prompt], values)
    return GenerateExchange(generations, served.name, str(identifier), stream)


class _Generations(msgspec.Struct, frozen=True):
    """One generation per prompt, what its text begins with, and warnings."""

    requests: tuple[GenerationRequest, ...]
    beginnings: tuple[str, ...]
    warnings: tuple[str, ...]


def _generations(
    request: Input, served: ServedModel, prompts: Sequence[str], values: Mapping[str, Any]
) -> _Generations:
    parameters = _parameters(values)
    full_text = parameters.get("return_full_text") is True
    # Only what is generated counts here: the answer is written by this dialect, whatever form LMI's would have.
    plain = msgspec.structs.replace(
        request,
        route=GENERATE,
        properties={name: value for name, value in request.properties.items() if name != "accept"},
    )
    parsed = [lmi.parse_tgi(plain, {"inputs": prompt, "parameters": parameters}, served) for prompt in prompts]
    if any(len(exchange.requests) > 1 for exchange in parsed):
        raise RequestError("n and best_of are not possible in this answer; send the prompt several times")
    return _Generations(
        tuple(exchange.requests[0] for exchange in parsed),
        tuple(prompt if full_text else "" for prompt in prompts),
        parsed[0].warnings,
    )


def _parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return LMI's parameters. As in Triton, empty texts and nulls stand for nothing."""
    more = values.get("sampling_parameters")  # of Triton's backend for vLLM: an object, as a text
    if isinstance(more, str):
        try:
            more = msgspec.json.decode(more)
        except msgspec.DecodeError as error:
            raise fields.not_allowed("sampling_parameters", more, "send a JSON object as a text") from error
    if more is not None and not isinstance(more, dict):
        raise fields.not_allowed("sampling_parameters", more, "send a JSON object as a text")
    merged = {**values, **(more or {})}
    merged.pop("sampling_parameters", None)
    if "details" in merged:
        raise RequestError("details are not in this answer; post to /generate, /invocations or /v1/completions")
    without_prompt = merged.pop("exclude_input_in_output", None)
    if without_prompt is not None:
        merged.setdefault("return_full_text", not without_prompt)
    return {_NAMES.get(name, name): value for name, value in merged.items() if value not in (None, "")}


def _one_value(tensor: Tensor) -> Any:
    if len(tensor.data) != 1:
        raise RequestError(
            f"input {excerpt(tensor.name)}: {len(tensor.data)} elements; a parameter has one, for all prompts"
        )
    return tensor.data[0]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise fields.not_allowed(name, value, "send the prompt as a string that is not empty")
    return value


class TensorExchange(Exchange):
    """Answers with the tensor `text_output`, an element per prompt."""

    def __init__(self, infer: InferRequest, generations: _Generations, model: str) -> None:
        self.requests = generations.requests
        self.warnings = generations.warnings
        self._infer, self._model = infer, model
        self._texts = [[beginning] for beginning in generations.beginnings]
        self._write()  # refuses an output that does not exist before anything is generated

    def _write(self) -> bytes:
        texts = ["".join(parts) for parts in self._texts]
        ((_, self.content_type), *self.headers), data = answer(
            self._infer, self._model, [Tensor(OUTPUT, "BYTES", (len(texts),), texts)]
        )
        return data

    def add(self, index: int, delta: Delta) -> bytes:
        self._texts[index].append(delta.text)
        return b""

    def body(self) -> bytes:
        return self._write()


class GenerateExchange(Exchange):
    """Answers with an object that has `text_output`: one of the whole text, or in a stream one of each piece."""

    error_route = V2_GENERATE_STREAM

    def __init__(self, generations: _Generations, model: str, identifier: str, stream: bool) -> None:
        self.requests = generations.requests
        self.warnings = generations.warnings
        self.stream = stream
        self.content_type = SSE.content_type if stream else "application/json"
        self._about = {"model_name": model, **({"id": identifier} if identifier else {})}
        self._beginning = generations.beginnings[0]
        self._parts: list[str] = []

    def first(self) -> bytes:
        return self._event(self._beginning) if self._beginning else b""

    def add(self, index: int, delta: Delta) -> bytes:
        if self.stream:
            return self._event(delta.text) if delta.text else b""
        self._parts.append(delta.text)
        return b""

    def body(self) -> bytes:
        return encode({**self._about, OUTPUT: "".join((self._beginning, *self._parts))})

    def _event(self, text: str) -> bytes:
        return SSE.frame({**self._about, OUTPUT: text})
