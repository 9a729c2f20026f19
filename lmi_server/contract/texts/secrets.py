"""What logs, errors and descriptions must not show: tokens, passwords and keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_plus

from lmi_server.contract.texts.quoting import LONGEST_MESSAGE, one_line

HIDDEN = "***"

_NAME = re.compile(  # smoothquant_per_token is no secret
    r"(?:^|[._])(?:(?<!_per_)token|secret|password|passwd|passphrase|pass|api_?keys?|secret_?(?:access_?)?key|credentials?)$",
    re.IGNORECASE,
)
# Neither goes over a character twice: a text of a client may be any. What one match has passed (++, the group of ?>) is
# not tried again, and the next one begins behind it.
_USER_INFO = re.compile(r"://[^/\s@\"']++@")
_SIGNED = re.compile(
    r"((?>[?&](?=[\w-]++=)[\w-]*?(?:signature|token|secret|password|credential|api_?key)[\w-]*=))[^&\s\"']++",
    re.IGNORECASE,
)
_SHORTEST = 6  # a shorter value would hide parts of ordinary words


class Secrets:
    """The values that are known to be secret, wherever they turn up."""

    def __init__(self, values: tuple[str, ...] = ()) -> None:
        self._values = values  # replaced, never changed: other threads read it

    def add(self, value: str) -> None:
        """Hide this value from now on."""
        if len(value) >= _SHORTEST and value not in self._values:
            self._values = tuple(dict.fromkeys((*self._values, value, one_line(value))))

    def add_named(self, values: Mapping[str, str]) -> None:
        """Hide values whose names mean secrets, and the values in a list of variables (A=1,B=2)."""
        for name, value in values.items():
            if is_secret(name):
                self.add(value)
            elif name.lower().endswith("option.env") or name == "OPTION_ENV":
                for entry in value.split(","):
                    variable, _, inner = entry.partition("=")
                    self.add_named({variable.strip(): inner.strip()})

    def mask(self, text: str) -> str:
        """Return the text without secrets: neither known values nor credentials in URLs."""
        for value in self._values:
            if value in text:
                text = text.replace(value, HIDDEN)
        return mask_url(text) if "://" in text else text

    def may_be_in(self, encoded: bytes) -> bool:
        """Return whether `masked` may change this text, which is in UTF-8."""
        # Most lines have no slash, and one character is found 50 times as fast as several.
        if b"/" in encoded and b"://" in encoded:
            return True
        return any(value.encode(errors="replace") in encoded for value in self._values)

    def mask_query(self, query: str) -> str:
        """Return the query of a URL without the values that are secret, or hold something secret. A long one is cut."""
        if len(query) > LONGEST_MESSAGE:
            query = f"{query[: LONGEST_MESSAGE - 4].rpartition('&')[0]}&..."
        return "&".join(map(self._mask_parameter, query.split("&")))

    def _mask_parameter(self, parameter: str) -> str:
        name, separator, value = parameter.partition("=")
        key, text = unquote_plus(name), unquote_plus(value)
        named = Secrets()
        named.add_named({key: text})
        is_plain = self.mask(named.mask(text)) == text and not is_secret(key)
        return parameter if is_plain else f"{name}{separator}{HIDDEN}"

    def mask_all(self, value: Any) -> Any:
        """Return a value made of dictionaries, lists and plain values, with every text in it masked."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, Mapping):
            return {key: HIDDEN if _hides(key, inner) else self.mask_all(inner) for key, inner in value.items()}
        return type(value)(map(self.mask_all, value)) if isinstance(value, list | tuple | set | frozenset) else value


def is_secret(name: str) -> bool:
    """Return whether the value of a key or variable of this name is secret (option.hf_token, AWS_SECRET_ACCESS_KEY)."""
    return _NAME.search(name) is not None


def mask_url(text: str) -> str:
    """Return the text with what URLs in it hold of credentials hidden: user and password, tokens, signatures."""
    return _SIGNED.sub(rf"\1{HIDDEN}", _USER_INFO.sub(f"://{HIDDEN}@", text))


def _hides(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and bool(value) and is_secret(key)


SECRETS = Secrets()
"""Those of this process. Every log line goes through it, so that it is one for all."""
