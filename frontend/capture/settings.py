"""The settings of the data capture."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmi_server.configuration.declaration import Allowed, FeatureSettings
from lmi_server.configuration.options import PositiveInt


class CaptureSettings(FeatureSettings):
    after = "log_prompts"

    capture_to: str | None = Field(
        None,
        description="Directory, or s3://bucket/prefix, that gets requests and answers in the JSON lines of SageMaker's "
        "data capture. If not set, nothing is captured.",
    )
    capture_percentage: Annotated[float, Field(ge=0, le=100), Allowed("a number from 0 to 100")] = Field(
        100.0, description="Share of the requests that is captured, in percent."
    )
    capture_redact: str | None = Field(
        None,
        description="Names of JSON fields, with commas between, whose values are replaced in what is captured. A body "
        "that cannot be read as JSON is then left out.",
    )
    capture_max_bytes: PositiveInt = Field(
        262144, description="Most bytes of a request, and of an answer, that are captured; the rest is cut off."
    )
    capture_memory: PositiveInt = Field(
        67108864, description="Most bytes that wait to be written; what comes beyond them is dropped and counted."
    )
    capture_file_size: PositiveInt = Field(
        67108864, description="Bytes of a captured file, from which on the next one is begun."
    )
    capture_files: PositiveInt = Field(
        10, description="Captured files that are kept in the directory; the oldest are removed. S3 keeps all."
    )
