"""Ids of requests that come without one."""

from __future__ import annotations

import secrets

_VARIANTS = "89ab"


def new_request_id() -> str:
    """Return the text of a random UUID (version 4, RFC 9562).

    Every request needs one, and `uuid.uuid4` takes twice as long: it makes an object first.
    """
    digits = secrets.token_hex(16)
    variant = _VARIANTS[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
