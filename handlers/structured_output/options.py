"""The keys of every handler that compiles constraints with llguidance; importable without it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmi_server.configuration.declaration import Allowed

WhiteSpaceLimit = Annotated[
    Annotated[int, Field(ge=0, le=9999)] | None,
    Allowed("an integer of 0 to 9999"),
    Field(
        description="Maximum number of white space characters on either side of a comma or a colon of JSON that a"
        " constraint asks for, with none elsewhere; 0 is compact JSON. If not set, white space has no bound, as JSON"
        " has none, and a small model may fill its answer with it. A request's guided_whitespace_pattern goes first."
    ),
]
"""The type of option.max_json_whitespace."""
