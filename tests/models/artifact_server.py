"""`python artifact_server.py DIR ROOT`: the server, with the files of its model fetched to ROOT. For tests only."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from frontend.server import run
from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.artifacts.model import fetch_model
from lmi_server.artifacts.progress import LogProgress
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.configuration.server import resolve_server
from lmi_server.model_store import Startup, startup_sources


def resolve(directory: Path, environment: Mapping[str, str], registration: Mapping[str, str]) -> ResolvedModel:
    fetched = asyncio.run(
        fetch_model(
            *(directory, environment, registration, artifact_settings(sys.argv[2], os.environ)),
            on_progress=LogProgress(directory.name),
        )
    )
    return fetched.resolved


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    settings, _ = resolve_server({}, {"port": 0})
    sources, _ = startup_sources(Startup([Path(sys.argv[1])]), {})
    sys.exit(run(sources, settings, {}, resolve))
