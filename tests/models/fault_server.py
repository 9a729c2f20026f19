"""`python fault_server.py [DIR]... [--model-store DIR]`: the server with handlers that are in no table.

A model names its handler in its serving.properties: option.test_handler=module:Class. Models that cannot be loaded
leave the others be, unless SERVING_WAIT_MODEL_LOADING says otherwise. For tests only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from frontend.server import run
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.configuration.server_settings import resolve_server
from lmi_server.serving.model_store import Startup, startup_sources


def inspect(directory: Path, environment: Mapping[str, str], registration: Mapping[str, str]) -> Inspection:
    found = inspect_model(directory, environment, registration)
    chosen = found.unknown.get("option.test_handler")
    if chosen is None:
        return found
    return dataclasses.replace(found, spec=dataclasses.replace(found.spec, handler=chosen.raw))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--model-store", type=Path)
    arguments = parser.parse_args()
    settings, _ = resolve_server({"SERVING_WAIT_MODEL_LOADING": "false", **os.environ}, {"port": 0})
    sources, _ = startup_sources(Startup(arguments.directories, model_store=arguments.model_store), {})
    of_models = {name: value for name, value in os.environ.items() if name.startswith("SAGEMAKER_")}
    sys.exit(run(sources, settings, of_models, inspect))
