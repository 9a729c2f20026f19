"""What follows from the model and from other settings where nobody decided: a layer above the defaults."""

from __future__ import annotations

from collections.abc import Mapping

from lmi_server.configuration.handlers import HandlerRow
from lmi_server.configuration.layers import Given


def recommend(row: HandlerRow | None, given: Given) -> Mapping[str, str]:
    """Return values by key; they are used where no higher layer has one, or where that says "auto"."""
    recommended: dict[str, str] = {}
    if row is not None and row.causal_lm_only:
        recommended["option.rolling_batch"] = "scheduler"
    if "minWorkers" in given and "maxWorkers" not in given:
        recommended["maxWorkers"] = given["minWorkers"].raw
    return recommended
