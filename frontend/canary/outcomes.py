"""What the end of a request says of the version that had it."""

from __future__ import annotations

from enum import Enum

import msgspec

from lmi_server.contract.errors import AbortedError, RequestError
from lmi_server.contract.protocol import Error, Item, Reply

_FAILED, _REFUSED = 500, 400
_LMI_REFUSED_OR_FAILED = 424  # LMI's status of a request that its handler has refused, and of one that has failed
_LMI_REFUSAL = "BadRequestException"
_LONGEST = 1 << 16  # bytes of an error that is read


class AnswerOutcome(Enum):
    """How a request ended.

    REFUSED is what the client got wrong, did not wait for, or sent when there was no room, and what a call has aborted:
    it says nothing of either version by itself.
    """

    SUCCESS = "success"
    REFUSED = "refused"
    ERROR = "error"


class _LmiError(msgspec.Struct):
    type: str = ""


def outcome_of(status: int, terminal: Item | None) -> AnswerOutcome:
    """Return what a status, and the last item of the answer, say."""
    if status < _REFUSED:
        return AnswerOutcome.SUCCESS
    if isinstance(terminal, Error) and isinstance(terminal.exception(), (RequestError, AbortedError)):
        return AnswerOutcome.REFUSED  # also with a status of 504: the client may set as short a deadline as it likes
    if status == _LMI_REFUSED_OR_FAILED:
        return AnswerOutcome.REFUSED if _is_refusal(terminal) else AnswerOutcome.ERROR
    return AnswerOutcome.ERROR if status >= _FAILED else AnswerOutcome.REFUSED


def _is_refusal(terminal: Item | None) -> bool:
    if not isinstance(terminal, Reply) or len(terminal.data) > _LONGEST:
        return False  # a stream that has begun was not refused
    try:
        return msgspec.json.decode(terminal.data, type=_LmiError).type == _LMI_REFUSAL
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
