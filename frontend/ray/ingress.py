"""The front end of a cluster: `python -m frontend.ray.ingress`. The actor of an ingress starts it.

It is the front end of `lmi-server serve` with other models behind it: the replicas named by its actor.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from frontend.observability.server_log import formatter
from frontend.server import run
from lmi_server.configuration.server_settings import find_config_file, resolve_server
from lmi_server.machine.environment import process_environment
from lmi_server.processes.hidden_variables import hide_secrets
from lmi_server.ray.processes.registry import ClusterRegistry

logger = logging.getLogger(__name__)


def main() -> int:
    hide_secrets()
    host, port, drain_timeout = sys.argv[1:]
    environment = process_environment()
    flags = {"host": host, "port": int(port), "drain_timeout": float(drain_timeout), "model_store": None}
    settings, warnings = resolve_server(environment, flags, find_config_file(environment, Path.cwd()))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(settings.log_format))
    logging.basicConfig(level="INFO", handlers=[handler])
    for warning in warnings:
        logger.warning(warning)
    return run([], settings, environment, registry=ClusterRegistry)


if __name__ == "__main__":
    sys.exit(main())
