"""The priority of a request, as its `x-priority` header gives it."""

from __future__ import annotations

import re

from lmi_server.contract.errors import RequestError

DEFAULT_PRIORITY = 3

_INTEGER = re.compile(r"-?[0-9]{1,10}")
_PRIORITIES = range(-(2**31), 2**31)


def parse_priority(value: str | None) -> int:
    """Return the value of an `x-priority` header: lower is served sooner, 3 where it is absent.

    Raises RequestError where it is not an integer of 32 bits.
    """
    if value is None:
        return DEFAULT_PRIORITY
    if _INTEGER.fullmatch(value) is None or int(value) not in _PRIORITIES:
        raise RequestError(
            f"Header x-priority is {value[:60]!r}; it takes an integer (lower is served sooner) "
            f"from {_PRIORITIES.start} to {_PRIORITIES.stop - 1}"
        )
    return int(value)
