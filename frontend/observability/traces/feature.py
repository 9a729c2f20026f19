"""Traces requests if `otlp_traces_endpoint` is set."""

from __future__ import annotations

from frontend.features import ServerParts
from frontend.observability.traces.tracing import Tracing


def attach(server: ServerParts) -> None:
    """Have the reports of requests trace them. Raises ConfigurationError."""
    server.relay.reports.tracing = Tracing.from_settings(server.settings)
