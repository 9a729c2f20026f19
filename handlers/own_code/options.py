"""Keys of serving.properties for a model with its own code, which alone decides what most of them mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Key
from lmi_server.configuration.options import ModelOptions, lower
from lmi_server.configuration.references import FOR_OPERATOR, NAMES_NOTHING


class OwnCodeOptions(ModelOptions):
    """Allows values that other handlers refuse, and keeps in `given` every key as it was written, for the code."""

    task: Annotated[str | None, NAMES_NOTHING] = None
    """For the code to read."""
    # dtype and rolling_batch allow more than in the base class: the user's code gives the values their meaning, and
    # nothing reads them through the base class.
    dtype: Annotated[str, Key(also=("option.data_type",)), NAMES_NOTHING] = Field(  # type: ignore[assignment]
        "auto", description="For the code to read."
    )
    tensor_parallel_degree: Annotated[
        Annotated[int, Field(ge=1)] | Literal[-1, "max"],
        BeforeValidator(lambda value: int(value) if value == "-1" else lower(value)),
        Allowed("an integer of 1 or more, or max"),
    ] = 1
    """GPUs that each worker sees."""
    handler: Annotated[str, NAMES_NOTHING] = "handle"
    """Function of the entry point that takes the requests."""
    rolling_batch: Annotated[str, BeforeValidator(lower), NAMES_NOTHING] = Field(  # type: ignore[assignment]
        "disable", description="Anything but disable: the function is called once per step with all running requests."
    )
    max_rolling_batch_size: Annotated[int, Field(ge=1), Allowed("an integer of 1 or more")] = 32
    """Requests that a worker holds at once, if it does not take one batch after the other."""
    async_mode: bool = False
    """Call the function for each request as it arrives, as an async function is in any case."""
    allow_private_media: Annotated[bool, FOR_OPERATOR] = False
    """Let `fetch_image` of djl_python fetch from private addresses too, as LMI does."""
    output_formatter: Annotated[str | None, NAMES_NOTHING] = None
    """For the code to read."""
    input_formatter: Annotated[str | None, NAMES_NOTHING] = None
    """For the code to read."""

    @property
    def given(self) -> Mapping[str, str]:
        """Return the values of all keys that a layer sets, by key without "option."; also those of the model server."""
        return self.passed_through
