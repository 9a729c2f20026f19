"""Values that can cross any border: no text in them has what UTF-8 cannot encode.

Python's strings may hold lone surrogates: from `json.loads`, from names of files, from the code of users.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lmi_server.contract.texts.quoting import sendable


def all_sendable(value: Any) -> Any:
    """Return lists, tuples and dictionaries with escapes in place of the lone surrogates of all their texts."""
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, list | tuple):
        return [all_sendable(each) for each in value]
    if isinstance(value, dict):
        return {all_sendable(key): all_sendable(each) for key, each in value.items()}
    return value


def json_bytes(value: Any) -> bytes:
    """Return the value in JSON, with escapes in place of lone surrogates."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(all_sendable(msgspec.to_builtins(value)))
