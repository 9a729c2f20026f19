"""The environments of clients, whose packages are not those of the server: docs/clients.md's, and SageMaker's SDK.

`make setup` makes them; CLIENTS_PYTHON may name the interpreter of another one for the former.
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


def _python(environment: str) -> str:
    own = Path(sys.prefix, environment, "bin", "python")
    return str(own) if own.exists() else sys.executable


PYTHON = os.environ.get("CLIENTS_PYTHON", _python("clients"))
SAGEMAKER_PYTHON = _python("sagemaker")
_RUNNER = str(MODEL_CODE / "client_scripts.py")
# LiteLLM would ask the internet for prices.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True"
}
_FIND = "import importlib.util, json, sys; print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))"


class ClientScripts:
    """What pieces of code print that ran in the environment of the clients, all in one process."""

    def __init__(self, scripts: Mapping[str, tuple[str, str]], python: str = PYTHON, **variables: str) -> None:
        """Run `scripts`, each by its name: the client that it needs, and its code."""
        here = installed({client for client, _ in scripts.values()}, python)
        self._left_out = {name: client for name, (client, _) in scripts.items() if client not in here}
        chosen = {name: code for name, (_, code) in scripts.items() if name not in self._left_out}
        ran = subprocess.run(
            [python, "-W", "ignore", _RUNNER],
            input=json.dumps(chosen),
            capture_output=True,
            text=True,
            env=_ENVIRONMENT | variables,
            timeout=600,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        self._outcomes = json.loads(ran.stdout.splitlines()[-1])

    def output(self, name: str) -> str:
        """Return what a script printed; skip the test if its client is not installed."""
        if name in self._left_out:
            pytest.skip(f"{self._left_out[name]} is not installed; `make setup` installs all clients")
        printed, error = self._outcomes[name]
        assert printed is not None, error
        return str(printed)


def installed(clients: set[str], python: str = PYTHON) -> set[str]:
    found = subprocess.run([python, "-c", _FIND, *clients], capture_output=True, text=True, check=True)
    return set(json.loads(found.stdout))
