"""From the form of requests that Amazon Bedrock sends to LMI's."""

from __future__ import annotations

from typing import Any

_STREAM = "InvokeEndpointWithResponseStream"


def parse_3p_request(
    input_map: dict[str, Any], is_rolling_batch: bool, tokenizer: Any, invoke_type: str
) -> tuple[Any, dict[str, Any]]:
    """Take the prompt and the parameters out of a body; return them as LMI names them.

    `invoke_type` is the header X-Amzn-SageMaker-Forwarded-Api. Raises KeyError if the body has no `prompt`.
    """
    prompt = input_map.pop("prompt")
    streams = invoke_type == _STREAM
    parameters = {
        "temperature": input_map.pop("temperature", 0.5),
        "top_p": input_map.pop("top_p", 0.9),
        "max_new_tokens": input_map.pop("max_gen_len", 512),
        "details": True,
        "return_full_text": True,
        "output_formatter": "3p_stream" if streams else "3p",
    }
    if parameters["temperature"] > 0:
        parameters["do_sample"] = True
    if streams:
        parameters["stream"] = True
    return prompt, parameters
