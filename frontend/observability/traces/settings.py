"""The settings that ask for traces."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmi_server.configuration.declaration import Allowed, FeatureSettings


class TraceSettings(FeatureSettings):
    after = "log_prompts"

    otlp_traces_endpoint: Annotated[
        str | None, Field(pattern=r"^https?://[^/\s]+/\S*$"), Allowed("a URL, such as http://collector:4318/v1/traces")
    ] = Field(None, description="Where traces go, by OTLP over HTTP; none if not set. It needs the extra otel.")
    trace_sample: Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")] = Field(
        1.0, description="Share of the requests without a traceparent that are traced; with one, its flag decides."
    )
