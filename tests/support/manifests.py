"""Manifests of Kubernetes in tests: read, rendered by helm and kubectl, and what they give a server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmi_server.configuration.server_settings import ServerSettings, resolve_server

VERSION = "1.37"
UNPACKED = Path(sys.prefix) / "kubernetes"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def program(name: str) -> str:
    """Return the path of helm or kubectl; skips if there is none."""
    found = shutil.which(name, path=str(UNPACKED)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make setup` unpacks it")
    return found


def rendered(*command: str) -> list[dict[str, Any]]:
    """Return the objects that a command prints; raises CalledProcessError with what it complains about."""
    done = subprocess.run([program(command[0]), *command[1:]], capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def settings_of(container: dict[str, Any]) -> ServerSettings:
    """Return the settings that the variables of a container give a server."""
    settings, warnings = resolve_server(variables_of(container), {})
    assert not warnings
    return settings
