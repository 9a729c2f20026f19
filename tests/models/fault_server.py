"""`python fault_server.py DIRECTORY HANDLER`: the server with a handler that is in no table. For tests only."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from frontend.server import run
from lmi_server.configuration.resolve import resolve_model
from lmi_server.configuration.server import resolve_server

if __name__ == "__main__":
    model = resolve_model(Path(sys.argv[1]), {})
    settings, _ = resolve_server(os.environ, {"port": 0})
    sys.exit(run([dataclasses.replace(model, handler=sys.argv[2])], settings))
