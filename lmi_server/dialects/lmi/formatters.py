"""The values of option.output_formatter, and the framing that each of them means for an answer."""

from __future__ import annotations

from lmi_server.contract.protocol import Input
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.framing import JSON_LINES, SSE, Framing

TEXT_ONLY = "none"  # the generated text alone, without JSON around it
_FRAMINGS: dict[str, Framing | None] = {"json": None, "jsonlines": JSON_LINES, "sse": SSE}
_CHAT_FORMATTERS = ("json_chat", "jsonlines_chat", "sse_chat")
FORMATTER_NAMES = (*_FRAMINGS, *_CHAT_FORMATTERS, TEXT_ONLY)
"""The values of option.output_formatter that do not name a function of the model's own code."""


def choose_framing(
    request: Input, served: ServedModel, stream: bool, as_tgi: bool
) -> tuple[Framing | None, tuple[str, ...]]:
    """Return the framing of a streamed answer, or None for one JSON object; and the warnings.

    `stream` is the request's own wish. option.output_formatter overrules it, as with LMI, except where the answer has
    text-generation-inference's form (`as_tgi`).
    """
    if as_tgi:
        return (SSE if stream else None), ()
    name = served.output_formatter
    if name is not None and name in _FRAMINGS:
        return _FRAMINGS[name], ()
    warnings = formatter_warnings(name)
    if not stream:
        return None, warnings
    return unnamed_framing(request, served), warnings


def unnamed_framing(request: Input, served: ServedModel) -> Framing:
    """Return the framing of a stream on LMI's routes if no option names one."""
    wants_events = served.tgi_compat or SSE.content_type in request.properties.get("accept", "")
    return SSE if wants_events and not served.async_service else JSON_LINES


def formatter_warnings(name: str | None) -> tuple[str, ...]:
    """Return a warning if option.output_formatter names no formatter of any dialect."""
    if name is None or name in FORMATTER_NAMES:
        return ()
    return (f"option.output_formatter={name} is not known and is ignored; use one of {', '.join(FORMATTER_NAMES)}",)
