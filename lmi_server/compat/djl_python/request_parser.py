"""LMI's parser of requests for generated text. `djl_python.input_parser` has its functions, too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from djl_python.chat_completions.chat_utils import is_chat_completions_request, parse_chat_completions_request
from djl_python.encode_decode import decode
from djl_python.input_parser import SAGEMAKER_ADAPTER_IDENTIFIER_HEADER
from djl_python.inputs import Input
from djl_python.properties_manager.properties import is_rolling_batch_enabled
from djl_python.request import Request
from djl_python.request_io import RequestInput, TextInput

__all__ = [
    "ParsedInput",
    "add_server_maintained_params",
    "format_input",
    "get_batch_start_id",
    "get_req_id_counter",
    "parse_adapters",
    "parse_input_with_formatter",
    "parse_lmi_default_request_rolling_batch",
    "parse_text_inputs_params",
]

logger = logging.getLogger(__name__)

_FAILED = "Input Parsing failed. Ensure that the request payload is valid. "


@dataclass
class ParsedInput:
    """The new requests of a batch, and the errors of unreadable ones, by index."""

    errors: dict[int, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    batch: list[Input] = field(default_factory=list)


def parse_input_with_formatter(inputs: Input, **kwargs: Any) -> ParsedInput:
    """Parse the new requests of a batch with `configs.input_formatter`, or with `format_input`.

    `kwargs` are those of input formatters: `configs`, `tokenizer`, `rolling_batch` and others.
    """
    configs = kwargs["configs"]
    kwargs["is_rolling_batch"] = is_rolling_batch_enabled(configs.rolling_batch)
    parsed = ParsedInput(batch=inputs.get_batches())
    counter = get_req_id_counter(kwargs)
    for index in range(get_batch_start_id(parsed.batch, **kwargs), len(parsed.batch)):
        item = parsed.batch[index]
        try:
            given = (configs.input_formatter or format_input)(item, **kwargs)
            given.request_id = index if counter is None else counter.next_id()
            given.client_request_id = item.get_property("requestId")
            given.tokenizer = kwargs.get("tokenizer")
            given.tgi_compat = configs.tgi_compat
            add_server_maintained_params(given, item, **kwargs)
            parsed.requests.append(Request(given))
        except Exception as error:  # the border to formatters, which raise anything; the other requests go on
            reason = f"Invalid Request Property: {error}" if isinstance(error, KeyError) else str(error)
            parsed.errors[index] = _FAILED + reason
            logger.warning("request %s: %s", item.get_property("requestId"), _FAILED + reason, exc_info=True)
    return parsed


def get_batch_start_id(batch: list[Input], **kwargs: Any) -> int:
    """Return the index of the first new request of a batch: a rolling batch has the running ones before it."""
    if not kwargs.get("is_rolling_batch"):
        return 0
    return min(len(kwargs["rolling_batch"].active_requests), len(batch))


def get_req_id_counter(kwargs: Mapping[str, Any]) -> Any:
    """Return the counter of a rolling batch; None for other batches."""
    return kwargs["rolling_batch"].req_id_counter if kwargs.get("is_rolling_batch") else None


def format_input(input_item: Input, **kwargs: Any) -> RequestInput:
    """Return a request in LMI's form or a chat completion as TextInput."""
    request_input = TextInput()
    body = decode(input_item, input_item.get_property("Content-Type"))
    parse_text_inputs_params(request_input, input_item, body, **kwargs)
    parse_adapters(request_input, input_item, body, **kwargs)
    return request_input


def parse_text_inputs_params(
    request_input: TextInput, input_item: Input, input_map: dict[str, Any], **kwargs: Any
) -> None:
    """Set prompt and parameters of `request_input`."""
    if is_chat_completions_request(input_map):
        text, parameters = parse_chat_completions_request(
            input_map,
            kwargs.get("is_rolling_batch", False),
            kwargs.get("tokenizer"),
            image_token=kwargs.get("image_placeholder_token"),
            configs=kwargs.get("configs"),
            is_mistral_tokenizer=kwargs.get("is_mistral_tokenizer", False),
        )
    elif kwargs.get("is_rolling_batch"):
        text, parameters = parse_lmi_default_request_rolling_batch(input_map)
    else:
        text, parameters = input_map.pop("inputs", input_map), input_map.pop("parameters", {})
    request_input.input_text, request_input.parameters = text, parameters
    if "cached_prompt" in input_map:
        request_input.parameters["cached_prompt"] = input_map.pop("cached_prompt")


def parse_lmi_default_request_rolling_batch(payload: Any) -> tuple[str, dict[str, Any]]:
    """Return prompt and parameters of a body in LMI's form. Raises ValueError for any other body."""
    if not isinstance(payload, dict):
        raise ValueError(f"the body is a {type(payload).__name__}; send a JSON object")
    text, parameters = payload.get("inputs"), payload.get("parameters") or {}
    if not isinstance(text, str) or not text:
        raise ValueError('"inputs" is missing or no text; send a text that is not empty')
    if not isinstance(parameters, dict):
        raise ValueError(f'"parameters" is a {type(parameters).__name__}; send a JSON object')
    return text, {**parameters, "stream": payload.get("stream", False)}


def add_server_maintained_params(request_input: RequestInput, input_item: Input, **kwargs: Any) -> None:
    """Set `server_parameters`: those of the request, a seed, and the form of the answer."""
    parameters = request_input.server_parameters = dict(request_input.parameters)
    if "seed" not in parameters and input_item.contains_key("seed"):
        parameters["seed"] = input_item.get_as_string("seed")
    parameters.setdefault("output_formatter", kwargs["configs"].output_formatter)


def parse_adapters(request_input: TextInput, input_item: Input, input_map: Mapping[str, Any], **kwargs: Any) -> None:
    """Set the adapters of a request. Raises ValueError for unknown ones, and if there is not one for each input."""
    if not getattr(kwargs.get("configs"), "enable_lora", False):
        return
    named = _named_adapters(input_item, input_map)
    if not named:
        return
    registry = kwargs.get("adapter_registry") or {}
    unknown = [name for name in named if name and name not in registry]
    if unknown:
        raise ValueError(f"Adapter {unknown[0]} is not registered")
    count = len(request_input.input_text) if isinstance(request_input.input_text, list) else 1
    if count != len(named):
        raise ValueError("Number of adapters is not equal to the number of inputs")
    adapters = [registry.get(name) for name in named]
    request_input.adapters = adapters[0] if len(adapters) == 1 else adapters


def _named_adapters(input_item: Input, input_map: Mapping[str, Any]) -> list[str]:
    header = input_item.get_property(SAGEMAKER_ADAPTER_IDENTIFIER_HEADER)
    if header:
        return [header]
    if input_item.contains_key("adapter"):
        return [input_item.get_as_string("adapter")]
    named = input_map.get("adapters") or []
    return named if isinstance(named, list) else [named]
