"""One TLS context for all clients of httpx: each would read the authorities' certificates, 20 ms of a processor."""

from __future__ import annotations

import functools
import os
import ssl
import sys
from typing import Any


def share() -> None:
    """Have httpx make its usual context once, if anything has imported httpx; other contexts are made as ever."""
    transports = sys.modules.get("httpx._transports.default")
    if transports is None:
        return
    usual: Any = vars(transports)["create_ssl_context"]
    if isinstance(usual, _Shared):
        return
    vars(transports)["create_ssl_context"] = _Shared(usual)


class _Shared:
    def __init__(self, make: Any) -> None:
        self._make = make
        self._usual = functools.cache(make)

    def __call__(self, verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        own = os.environ.keys() & {"SSL_CERT_FILE", "SSL_CERT_DIR"}
        if verify is not True or cert is not None or own:
            return self._make(verify=verify, cert=cert, trust_env=trust_env)
        return self._usual()
