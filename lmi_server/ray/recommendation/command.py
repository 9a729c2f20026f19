"""`lmi-server recommend`: settings for a model on an accelerator."""

from __future__ import annotations

from typing import Annotated

import typer

from lmi_server.client.numbers import count
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.machine.device_tools import nvidia_products
from lmi_server.machine.environment import process_environment
from lmi_server.ray.recommendation.recommendation import (
    CONTEXT,
    DEGREES,
    Goal,
    find_accelerator,
    find_model,
    own_accelerator,
)
from lmi_server.ray.recommendation.recommendation import recommend as recommend_settings


def recommend(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Directory with a config.json, or a family: llama-3.1-8b, ...")
    ],
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="T4, L4, A10G, A100-40G, A100-80G, H100, H200, MI300X, Inf2, Trn1; this machine's GPU if not set."
        ),
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput/--latency", help="Many requests per device, or quick tokens for each.")
    ] = False,
    context: Annotated[int, count("--context", "Most tokens of prompt and output together.")] = CONTEXT,
    as_file: Annotated[bool, typer.Option("--file", help="Print a model file of Ray.")] = False,
) -> None:
    """Recommend a serving.properties for a model on an accelerator, by its size and the memory.

    It takes the fewest devices on which the model fits; a model file for low latency takes twice as many.
    """
    from lmi_server.ray.recommendation.files import model_file

    with plain_configuration_errors():
        products = nvidia_products(process_environment()) if accelerator is None else ()
        device = own_accelerator(products) if accelerator is None else find_accelerator(accelerator)
        found_model = find_model(model)
        goal: Goal = "throughput" if throughput else "latency"
        found = recommend_settings(found_model, device, goal, context, len(products) or DEGREES[-1], spread=as_file)
    text = model_file(found_model, device, found) if as_file else found.properties(found_model, device)
    typer.echo(text, nl=False)
