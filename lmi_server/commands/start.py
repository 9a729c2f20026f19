"""The beginning of the command `lmi-server`: secrets are hidden before anything else is imported."""

from __future__ import annotations

import gc

from lmi_server.processes.hidden_variables import hide_secrets


def main() -> None:
    """Run the command line."""
    hide_secrets()
    gc.disable()  # it would walk what the imports make again and again, 6 % of the start of `lmi-server version`
    from lmi_server.commands.cli import app

    gc.freeze()
    gc.enable()
    app(prog_name="lmi-server")
