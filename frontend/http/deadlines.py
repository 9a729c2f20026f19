"""Until when a request is worth an answer, by its headers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lmi_server.contract.errors import BadParameterError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.supervisor.job import Deadline

_REQUEST_TIMEOUT = "x-request-timeout"
# What the clients of OpenAI and Anthropic send unasked: the seconds for which they wait for a part of the answer.
_CLIENT_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def deadline_of(headers: Mapping[str, str], arrived: float) -> Deadline | None:
    """Return the deadline of a request that arrived at `arrived`; None if it has none. Raises BadParameterError."""
    asked = headers.get(_REQUEST_TIMEOUT)
    if asked is not None:
        seconds = _seconds(asked)
        if not seconds:
            raise BadParameterError(
                f"Header {_REQUEST_TIMEOUT} is '{excerpt(asked)}'; send a number of seconds above 0, such as 30 or 2.5"
            )
        return Deadline(arrived + seconds, f"{_REQUEST_TIMEOUT}={seconds:g}", ends_running=True)
    for name in _CLIENT_TIMEOUTS:
        if name in headers and (seconds := _seconds(headers[name])):
            return Deadline(arrived + seconds, f"{name}={seconds:g}", ends_running=False)
    return None


def _seconds(text: str) -> float:
    """Return a number of seconds, 0.0 if the text is none."""
    return float(text) if _SECONDS.fullmatch(text) is not None else 0.0
