"""Writes embedded metrics if `emf_namespace` is set."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from frontend.emf.embedded_metrics import EmbeddedMetrics
from frontend.emf.settings import EmbeddedMetricsSettings
from frontend.features import ServerFeature, ServerParts


def attach(server: ServerParts) -> ServerFeature | None:
    """Return the feature; None if there is no namespace."""
    namespace = server.settings.part(EmbeddedMetricsSettings).emf_namespace
    if namespace is None:
        return None
    return _Feature(EmbeddedMetrics(namespace, server.metrics, lambda: server.models.models))


class _Feature(ServerFeature):
    def __init__(self, metrics: EmbeddedMetrics) -> None:
        self._metrics = metrics

    def tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._metrics.run(),)
