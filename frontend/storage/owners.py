"""Whose objects are whose: each API key has a folder of its own, and no key reads another's.

The folder is named by a hash of the key's digest. So a store says nothing about keys, and a key that stays in the
settings finds its objects again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time

from frontend.access.api_keys import TENANT, KeyRing
from frontend.http.clients import Scope

EVERYONE = "all"
"""The folder of a server without keys."""

_FOLDER = re.compile(r"[0-9a-f]{32}")
_ID = re.compile(r"(?:file-|batch_|resp_)[0-9a-f]{31}")


def owner_of(scope: Scope) -> str:
    """Return the folder for the objects of this request's key."""
    digest: bytes = scope.get(TENANT, b"")
    return _folder(digest)


def _folder(digest: bytes) -> str:
    return hashlib.sha256(b"owner" + digest).hexdigest()[:32] if digest else EVERYONE


def is_owner(folder: str) -> bool:
    """Return whether a folder of a store could be an owner's; a file system may have others, such as lost+found."""
    return folder == EVERYONE or _FOLDER.fullmatch(folder) is not None


def tenants(keys: KeyRing | None) -> dict[str, bytes]:
    """Return the tenant for the job queue of each folder whose key is valid."""
    return {EVERYONE: b""} if keys is None else {_folder(digest): digest for digest in keys.digests}


def new_id(prefix: str) -> str:
    """Return an id that sorts behind those made before."""
    return f"{prefix}{time.time_ns() // 1_000_000:011x}{secrets.token_hex(10)}"


def created_at(identity: str) -> float:
    """Return when an id was made, in seconds since 1970; 0.0 if it is none."""
    digits = identity[-31:][:11]
    return int(digits, 16) / 1000 if _ID.fullmatch(identity) else 0.0


def is_id(prefix: str, text: str) -> bool:
    """Return whether this could be an id made with `prefix`, and so is safe as the last part of a key."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None
