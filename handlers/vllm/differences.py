"""What differs between the versions of vLLM that the handlers run with (`interface.TESTED`), in one place.

Each difference is a function, or a name with two homes, and names the versions that differ from the newest.
`tests/engines/vllm/test_versions.py` looks for each in the versions that are installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

try:
    from vllm.renderers.chat_utils import ChatTemplateConfig, make_tool_call_id
except ImportError:  # 0.31
    from vllm.entrypoints.chat_utils import ChatTemplateConfig, make_tool_call_id

__all__ = ["ChatTemplateConfig", "make_tool_call_id"]


def chat_template_kwargs(renderer: Any, chat: Any) -> Mapping[str, Any]:
    """Return the variables with which `renderer`, an OnlineRenderer, renders the ChatCompletionRequest `chat`.

    0.31 has no method for it, and does the same in its own code.
    """
    if hasattr(renderer, "effective_chat_template_kwargs"):
        found: Mapping[str, Any] = renderer.effective_chat_template_kwargs(chat)
    else:
        params = chat.build_chat_params(renderer.chat_template, renderer.chat_template_content_format)
        found = params.with_defaults(renderer.default_chat_template_kwargs).chat_template_kwargs
    return found


def validate_token_ids(renderer: Any, ids: Sequence[int]) -> None:
    """Raise VLLMValidationError if the vocabulary of model and tokenizer lacks an id. 0.31 checks in the engine."""
    if hasattr(renderer, "validate_token_ids"):
        renderer.validate_token_ids(ids)
        return
    size = max(renderer.get_tokenizer().max_token_id + 1, renderer.model_config.get_vocab_size())
    for token in ids:
        if not 0 <= token < size:
            raise VLLMValidationError(f"Token id {token} is out of vocabulary")


def set_prompt(parser: Any, ids: Sequence[int]) -> None:
    """Tell a parser of answers the prompt, before it parses a whole output. Those of 0.31 do not read it."""
    if hasattr(parser, "set_prompt_token_ids"):
        parser.set_prompt_token_ids(ids)


def failure_of(output: Any) -> str | None:
    """Return why a request ended without the result of its PoolingRequestOutput. Those of 0.31 always have one."""
    error = getattr(output, "error", None)
    return None if error is None else str(error.message)
