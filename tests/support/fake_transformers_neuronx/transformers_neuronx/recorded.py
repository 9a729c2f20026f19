"""The calls that the fake got, and the failure that it was asked for."""

from __future__ import annotations

import json
import os
from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []


def record(name: str, **arguments: Any) -> None:
    calls.append((name, arguments))
    path = os.environ.get("FAKE_NEURONX_CALLS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps([name, arguments], default=vars) + "\n")


def fails(kind: str) -> bool:
    return os.environ.get("FAKE_NEURONX_FAILS") == kind
