"""`lmi-server run-batch`: answers a file of requests without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_server.artifacts.location import MODEL_FORMS
from lmi_server.client.numbers import count
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError, LmiServerError
from lmi_server.machine.environment import process_environment


def run_batch(
    requests: Annotated[Path, typer.Argument(metavar="IN", help="JSON lines with custom_id, url and body.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="File for the answers, one a line in any order.")],
    model: Annotated[str, typer.Option("--model", "-m", help=f"Model: {MODEL_FORMS}.")],
    concurrency: Annotated[int, count("--concurrency", "Requests at a time.")] = 256,
) -> None:
    """Answer the requests of a file with a model, in the form of OpenAI's batches and of vllm run-batch.

    The same call goes on where an earlier one has ended. The exit code is 1 if a request got an error.
    """
    import uvloop

    from lmi_server.batches.offline import OfflineBatch

    with plain_configuration_errors():
        try:
            counts = uvloop.run(OfflineBatch(requests, output, concurrency).run(model, process_environment()))
        except (LmiServerError, OSError) as error:
            raise ConfigurationError(getattr(error, "message", str(error))) from error
    typer.echo(f"{output}: {counts.answered} answers, {counts.failed} errors", err=True)
    raise typer.Exit(1 if counts.failed else 0)
