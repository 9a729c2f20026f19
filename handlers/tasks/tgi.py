"""The answers of static batches in the form of text-generation-inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from handlers.tasks.task import Piece
from lmi_server.dialects.framing import SSE
from lmi_server.dialects.lmi.objects import Details, LmiToken, TgiLine, TgiToken


def with_details(result: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the result for one sequence with its details, if it has any, in that form."""
    if not isinstance(result, dict) or not isinstance(result.get("details"), Details):
        return result
    details: Details = result["details"]
    tokens = [
        TgiToken(token.id, token.text, token.log_prob, token.special_token)
        for token in details.tokens or ()
        if isinstance(token, LmiToken)
    ]
    seed = parameters.get("seed")
    return {**result, "details": msgspec.structs.replace(details, tokens=tokens, prefill=[], seed=seed)}


def events(steps: Iterator[Sequence[Piece]], parameters: Mapping[str, Any], details: bool) -> Iterator[bytes]:
    """Yield the events of a stream for one input: one per piece of text, the last one with the whole text.

    A stream of static batches computes no log probabilities.
    """
    texts: list[str] = []
    for index, (piece,) in enumerate(step for step in steps if step[0].text or step[0].finish_reason):
        texts.append(piece.text)
        line = TgiLine(index + 1, TgiToken(piece.token, piece.text, None, False), UNSET)
        if piece.finish_reason is not None:
            line.generated_text = "".join(texts)
            if details:
                line.details = Details(piece.finish_reason, piece.tokens, seed=parameters.get("seed"))
        yield SSE.frame(line)
