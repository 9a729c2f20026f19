"""The setting that asks for metrics in CloudWatch's embedded metric format."""

from __future__ import annotations

from pydantic import Field

from lmi_server.configuration.declaration import FeatureSettings


class EmbeddedMetricsSettings(FeatureSettings):
    after = "metric_names"

    emf_namespace: str | None = Field(
        None,
        description="Namespace of CloudWatch: once a minute the log gets a line for each model in its embedded metric "
        "format.",
    )
