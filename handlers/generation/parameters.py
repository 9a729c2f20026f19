"""What engines make of the parameters of a request in the same way."""

from __future__ import annotations

import functools
import logging

from lmi_server.contract.errors import ContextLengthError
from lmi_server.contract.generation import SamplingParameters

logger = logging.getLogger(__name__)


def max_new_tokens(sampling: SamplingParameters, prompt: int, context: int) -> int:
    """Return how many tokens a request may generate behind a prompt of `prompt` tokens, all in a context of `context`.

    Raises ContextLengthError if that is fewer than it asks for and it does not let the context decide.
    """
    room = context - prompt
    wanted = sampling.max_new_tokens if sampling.max_new_tokens is not None else max(room, 1)
    if sampling.fit_context and room > 0:
        wanted = min(wanted, room)
    if wanted > room:
        raise ContextLengthError.from_counts(prompt, wanted, context)
    return wanted


def room_of(sampling: SamplingParameters, granted: int) -> int | None:
    """Return `granted`, the tokens that a request may generate, if it asks for more."""
    asked = sampling.max_new_tokens
    return granted if asked is not None and granted < asked else None


@functools.cache
def warn_of_typical_p(engine: str) -> None:
    """Warn once, not refuse: LangChain's HuggingFaceEndpoint sends it with every request."""
    logger.warning("typical_p is ignored, because %s has no such parameter; top_p is the nearest", engine)
