"""One TLS context for all clients of httpx: each would read the authorities, up to 35 ms of a processor."""

from __future__ import annotations

import functools
import os
import ssl
import sys
from typing import Any

_AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""The variables that name other authorities than httpx's own; many machines set them for all processes."""


def share() -> None:
    """Have httpx and httpx2 make their usual context once, if anything has imported them; others are made as ever."""
    for library in ("httpx", "httpx2"):
        transports = sys.modules.get(f"{library}._transports.default")
        if transports is not None and not isinstance(usual := vars(transports)["create_ssl_context"], _Shared):
            vars(transports)["create_ssl_context"] = _Shared(usual)


class _Shared:
    def __init__(self, make: Any) -> None:
        self._make = make
        self._usual = functools.cache(self._make_usual)

    def __call__(self, verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return self._make(verify=verify, cert=cert, trust_env=trust_env)
        return self._usual(tuple(os.environ.get(name) for name in _AUTHORITIES) if trust_env else None)

    def _make_usual(self, authorities: tuple[str | None, ...] | None) -> ssl.SSLContext:
        return self._make(trust_env=authorities is not None)
