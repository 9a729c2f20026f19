"""The keys of a router and what each may have, from a TOML file that is read again when it changes."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from frontend.access.api_keys import ApiKey, KeyRing
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.route.limits import Accounts, KeyLimits

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MARK = "sha256:"


class _Key(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A table [keys.NAME] of the file."""

    key: str
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    models: tuple[str, ...] | None = None
    priority: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, _Key]


_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month")
_COUNTS = ("max_concurrent_requests", *_LIMITS)
_EXAMPLE = '[keys.NAME] with key = "KEY" or "sha256:DIGEST", and any of models, priority, ' + ", ".join(_COUNTS)


class RouteKeys(KeyRing):
    """The keys of a file; `accounts` gets their limits."""

    def __init__(self, file: str, accounts: Accounts) -> None:
        self._accounts = accounts
        super().__init__("keys", "", file)

    def _read(self) -> Sequence[ApiKey]:
        assert self._file is not None
        keys, limits = _parse(self._file)
        self._accounts.replace(limits, time.monotonic())
        return keys


def _parse(file: str) -> tuple[Sequence[ApiKey], Mapping[bytes, KeyLimits]]:
    try:
        found = msgspec.toml.decode(Path(file).read_bytes(), type=_File).keys
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigurationError(f'--keys "{file}" cannot be used: {error}; allowed: {_EXAMPLE}') from error
    if not found:
        raise ConfigurationError(f'--keys "{file}" names no key; allowed: {_EXAMPLE}')
    keys: dict[bytes, ApiKey] = {}
    limits: dict[bytes, KeyLimits] = {}
    for name, entry in found.items():
        digest = _digest(file, name, entry)
        if digest in keys:
            raise ConfigurationError(f'--keys "{file}": keys.{excerpt(name)} has the key of another; give each its own')
        keys[digest] = ApiKey(digest, entry.max_concurrent_requests)
        limits[digest] = _limits(file, name, entry)
    return list(keys.values()), limits


def _digest(file: str, name: str, entry: _Key) -> bytes:
    digest = _DIGEST.fullmatch(entry.key)
    if digest is not None:
        return bytes.fromhex(digest[1])
    usable = entry.key.isascii() and entry.key.isprintable() and " " not in entry.key and entry.key
    if not usable or entry.key.lower().startswith(_MARK):
        raise ConfigurationError(
            f'--keys "{file}": keys.{excerpt(name)}.key is not allowed; write a key without spaces, or sha256: and 64 '
            "hexadecimal digits"
        )
    SECRETS.add(entry.key)
    return hashlib.sha256(entry.key.encode()).digest()


def _limits(file: str, name: str, entry: _Key) -> KeyLimits:
    for count in _COUNTS:
        value = getattr(entry, count)
        if value is not None and value < 1:
            raise ConfigurationError(
                f'--keys "{file}": keys.{excerpt(name)}.{count} = {value} is not allowed; write 1 or more'
            )
    if entry.priority is not None and not -(2**31) <= entry.priority < 2**31:
        raise ConfigurationError(
            f'--keys "{file}": keys.{excerpt(name)}.priority is not allowed; write a number of 32 bits'
        )
    shared = {each: getattr(entry, each) for each in ("models", "priority", *_LIMITS)}
    return KeyLimits(name=name, **shared)
