"""What every command prints when the configuration is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import for_terminal
from lmi_server.contract.texts.secrets import SECRETS


@contextmanager
def plain_configuration_errors() -> Iterator[None]:
    """Print the message of a ConfigurationError without a traceback, and exit with code 1."""
    try:
        yield
    except ConfigurationError as error:
        # soft_wrap: a problem stays one line on a narrow terminal. markup=False: the text may hold [brackets].
        message = for_terminal(SECRETS.mask(error.message))
        Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
