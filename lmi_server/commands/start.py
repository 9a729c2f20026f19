"""The beginning of the command `lmi-server`: secrets are hidden before anything else is imported."""

from __future__ import annotations

from lmi_server.processes.hidden_variables import hide_secrets


def main() -> None:
    """Run the command line."""
    hide_secrets()
    from lmi_server.commands.cli import app

    app(prog_name="lmi-server")
