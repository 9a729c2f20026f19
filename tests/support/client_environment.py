"""The environment of the clients of docs/clients.md, whose packages are not those of the server.

`make setup` makes it; CLIENTS_PYTHON may name the interpreter of another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from paths import MODEL_CODE

_OWN = Path(sys.prefix, "clients", "bin", "python")
PYTHON = os.environ.get("CLIENTS_PYTHON", str(_OWN) if _OWN.exists() else sys.executable)
_RUNNER = str(MODEL_CODE / "client_scripts.py")
# LiteLLM would ask the internet for prices.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True"
}
_FIND = "import importlib.util, json, sys; print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))"


class ClientScripts:
    """What pieces of code print that ran in the environment of the clients, all in one process."""

    def __init__(self, scripts: Mapping[str, tuple[str, str]]) -> None:
        """Run `scripts`, each by its name: the client that it needs, and its code."""
        here = installed({client for client, _ in scripts.values()})
        self._left_out = {name: client for name, (client, _) in scripts.items() if client not in here}
        chosen = {name: code for name, (_, code) in scripts.items() if name not in self._left_out}
        ran = subprocess.run(
            [PYTHON, "-W", "ignore", _RUNNER],
            input=json.dumps(chosen),
            capture_output=True,
            text=True,
            env=_ENVIRONMENT,
            timeout=600,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        self._outcomes = json.loads(ran.stdout.splitlines()[-1])

    def output(self, name: str) -> str:
        """Return what a script printed; skip the test if its client is not installed."""
        if name in self._left_out:
            pytest.skip(f"{self._left_out[name]} is not installed; it is in the extra clients")
        printed, error = self._outcomes[name]
        assert printed is not None, error
        return str(printed)


def installed(clients: set[str]) -> set[str]:
    found = subprocess.run([PYTHON, "-c", _FIND, *clients], capture_output=True, text=True, check=True)
    return set(json.loads(found.stdout))
