"""`lmi-server lsp`: the language server, which an editor starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.lsp.checked import Surroundings
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine, with_gpu_memory


def lsp(
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Standard input and output, as always: many editors say so by themselves.")
    ] = False,
) -> None:
    """Serve an editor over standard input and output: completion, hover, and what `check` finds while you type."""
    with plain_configuration_errors():
        if find_spec("pygls") is None:
            raise ConfigurationError("lmi-server lsp needs the package pygls; run: pip install 'lmi-server[lsp]'")
    # Imported late: it needs pygls.
    from lmi_server.lsp.server import serve_stdio

    environment = process_environment()
    SECRETS.add_named(environment)
    machine = with_gpu_memory(this_machine(environment, HANDLERS.engines()), environment)
    serve_stdio(Surroundings(environment, machine))
