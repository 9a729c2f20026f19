"""The settings of stored responses."""

from __future__ import annotations

from pydantic import Field

from frontend.storage.objects import StorePlace
from lmi_server.configuration.declaration import FeatureSettings
from lmi_server.configuration.options import PositiveInt, Seconds


class ResponseSettings(FeatureSettings):
    after = "model_url_pattern"

    responses_store: StorePlace = Field(
        None,
        description="Directory or s3://bucket/prefix that keeps the responses of /v1/responses, unless a request has "
        "store: false; batches_store may be the same. If not set, previous_response_id and background are refused.",
    )
    responses_max_count: PositiveInt = Field(
        10000, description="Responses of one API key that are kept; the oldest are removed."
    )
    responses_max_size: PositiveInt = Field(
        10737418240, description="Bytes of the responses of one API key that are kept; the oldest are removed."
    )
    responses_max_background: PositiveInt = Field(
        100, description="Most background responses of one API key that wait or run; further ones are refused with 429."
    )
    responses_lifetime: Seconds = Field(2592000.0, description="Seconds for which a response is kept.")
