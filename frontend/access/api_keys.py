"""API keys: who may send requests, and who may manage models.

A key is kept as its SHA-256 digest. That is enough for a random key, safe from guesses; it need not be slow to
compute as for passwords. A digest may stand in the settings in place of the key itself ("sha256:...").
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.http.watched_files import WatchedFiles
from lmi_server.contract.errors import AuthenticationError, ConfigurationError, KeyBusyError, LmiServerError
from lmi_server.contract.texts.secrets import SECRETS

logger = logging.getLogger(__name__)

Refuse = Callable[[str, LmiServerError, Scope, Receive, Send], Awaitable[None]]

TENANT = "lmi.tenant"
"""Where the scope of a request has the digest of its key, by which the job queue lets keys take turns."""

_HEADERS = (b"authorization", b"x-api-key")
_SEPARATOR = re.compile(r"[,\n]")
_DIGEST_MARK = "sha256:"
_DIGEST = re.compile(_DIGEST_MARK + r"([0-9a-fA-F]{64})")
_LIMIT = "max_concurrent_requests"
_FORM = f"KEY or sha256:DIGEST with 64 hexadecimal digits, then {_LIMIT}=NUMBER if the key has a limit"


@dataclass(slots=True)
class ApiKey:
    """One key: its digest, how many of its requests may run or wait at a time, and how many do."""

    digest: bytes
    limit: int | None = None
    running: int = 0


class KeyRing:
    """The keys of a setting and of its file, and of the file again when it changes. Raises ConfigurationError."""

    def __init__(self, setting: str, given: str, file: str | None) -> None:
        self._setting = setting
        self._given = given
        self._file = file
        self._watched = WatchedFiles(() if file is None else (file,))
        self._keys = self._read()

    @property
    def digests(self) -> list[bytes]:
        """Return the digests of the keys that are valid now."""
        return [key.digest for key in self._keys]

    async def watch(self) -> None:
        """Read the file again whenever it changes; if it cannot be used, that is reported and the keys stay.

        Requests of a key that is gone are finished. One that stays keeps the count of its requests.
        """
        while self._file is not None:
            await self._watched.wait_for_change()
            try:
                read = self._read()
            except ConfigurationError as error:
                logger.error("%s; the keys from before are valid", error)
                continue
            before = {key.digest: key for key in self._keys}
            for key in read:
                before.get(key.digest, key).limit = key.limit
            self._keys = [before.get(key.digest, key) for key in read]
            logger.info("%s_file was loaded again: %d keys are valid", self._setting, len(read))

    def _read(self) -> Sequence[ApiKey]:
        keys = [*_parse_keys(self._setting, self._given), *(() if self._file is None else self._of_file(self._file))]
        if not keys:
            raise ConfigurationError(
                f"{self._setting} names no key; allowed: {_FORM}; remove the setting to take all requests"
            )
        return keys

    def _of_file(self, file: str) -> Iterator[ApiKey]:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f'{self._setting}_file = "{file}" cannot be read: {error}') from error
        lines = ("" if line.lstrip().startswith("#") else line for line in text.splitlines())
        return _parse_keys(f"{self._setting}_file", "\n".join(lines))

    def check(self, scope: Scope) -> ApiKey:
        """Return the key of a request, and move it from the headers to `TENANT`. Raises AuthenticationError."""
        sent = _sent_key(scope)
        if not sent:
            raise AuthenticationError("No API key was sent; send it as Authorization: Bearer KEY, or as x-api-key: KEY")
        digest = hashlib.sha256(sent).digest()
        # All keys are compared: the time says nothing about which one is right.
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if not found:
            raise AuthenticationError("The API key is not one of this server")
        scope["headers"] = [header for header in scope["headers"] if header[0] not in _HEADERS]
        scope[TENANT] = found[0].digest
        return found[0]

    def protect(self, inference: Inference, refuse: Refuse) -> Inference:
        """Return `inference` for requests with a key; the others go to `refuse`."""

        async def call(target: Target, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                key = self._admit(scope)
            except LmiServerError as error:
                await refuse(target[0], error, scope, receive, send)
                return
            try:
                await inference(target, scope, receive, send)
            finally:
                key.running -= 1

        return call

    def _admit(self, scope: Scope) -> ApiKey:
        key = self.check(scope)
        if key.limit is not None and key.running >= key.limit:
            raise KeyBusyError(f"This API key may have {key.limit} requests at a time; wait for one of them to end")
        key.running += 1
        return key


def key_ring(setting: str, given: str | None, file: str | None) -> KeyRing | None:
    """Return the keys of a setting and of a file; None if neither is given. Raises ConfigurationError."""
    return None if given is None and file is None else KeyRing(setting, given or "", file)


def _parse_keys(setting: str, text: str) -> Iterator[ApiKey]:
    for number, entry in enumerate(_SEPARATOR.split(text), start=1):
        key, *rest = entry.split() or ("",)
        limit = _limit(rest)
        digest = _DIGEST.fullmatch(key)
        # A digest cut short would be a key of its own, without a client.
        if limit == 0 or len(rest) > 1 or (digest is None and key.lower().startswith(_DIGEST_MARK)):
            raise ConfigurationError(f"{setting}: entry {number} is not allowed; allowed: {_FORM}")
        if key:
            SECRETS.add(key)
            yield ApiKey(bytes.fromhex(digest[1]) if digest else hashlib.sha256(key.encode()).digest(), limit)


def _limit(rest: Sequence[str]) -> int | None:
    """Return the limit of a key, None if it has none, 0 if that is not readable."""
    if not rest:
        return None
    name, _, value = rest[0].partition("=")
    return int(value) if name == _LIMIT and value.isascii() and value.isdigit() else 0


def _sent_key(scope: Scope) -> bytes:
    headers = dict(scope["headers"])
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and bearer.strip():
        return bytes(bearer.strip())
    return bytes(headers.get(b"x-api-key", b"").strip())
