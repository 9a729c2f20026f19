"""The values of option.output_formatter, and the framing that each of them means for an answer."""

from __future__ import annotations

from collections.abc import Mapping

from lmi_server.contract.protocol import Input
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.framing import JSON_LINES, SSE, Framing

TEXT_ONLY = "none"  # the generated text alone, without JSON around it
FRAMINGS: Mapping[str, Framing | None] = {"json": None, "jsonlines": JSON_LINES, "sse": SSE}
CHAT_FRAMINGS: Mapping[str, Framing | None] = {"json_chat": None, "jsonlines_chat": JSON_LINES, "sse_chat": SSE}
FORMATTER_NAMES = (*FRAMINGS, *CHAT_FRAMINGS, TEXT_ONLY)
"""The values of option.output_formatter that do not name a function of the model's own code."""


def choose_framing(
    request: Input, served: ServedModel, stream: bool, by_name: Mapping[str, Framing | None] = FRAMINGS
) -> tuple[Framing | None, tuple[str, ...]]:
    """Return the framing of a streamed answer, or None for one JSON object; and the warnings.

    `stream` is the request's own wish. option.output_formatter overrules it, as with LMI, if `by_name` has its value.
    """
    name = served.output_formatter
    if name is not None and name in by_name:
        return by_name[name], ()
    return (unnamed_framing(request, served) if stream else None), _formatter_warnings(name)


def unnamed_framing(request: Input, served: ServedModel) -> Framing:
    """Return the framing of a stream on LMI's routes if no option names one."""
    wants_events = served.tgi_compat or SSE.content_type in request.properties.get("accept", "")
    return SSE if wants_events and not served.async_service else JSON_LINES


def _formatter_warnings(name: str | None) -> tuple[str, ...]:
    """Return a warning if option.output_formatter names no formatter of any dialect."""
    if name is None or name in FORMATTER_NAMES:
        return ()
    return (f"option.output_formatter={name} is not known and is ignored; use one of {', '.join(FORMATTER_NAMES)}",)
