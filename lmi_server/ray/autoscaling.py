"""How many replicas a model needs, from the requests that its replicas count themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ONGOING = "ongoing_requests"
"""The metric by which Ray scales a model."""


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many replicas hold `target_ongoing_requests` each, and no state.

    Ray applies factors, delays and bounds, as for its own policy. A model without replicas is woken by a call of a
    handle, which Ray counts itself.
    """
    held = sum(((context.aggregated_metrics or {}).get(ONGOING) or {}).values())
    config = context.config
    if config is None or not context.current_num_replicas:
        return context.target_num_replicas, {}
    return held / config.get_target_ongoing_requests(), {}
