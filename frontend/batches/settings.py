"""The settings of files and batches."""

from __future__ import annotations

from pydantic import Field

from frontend.storage.objects import StorePlace
from lmi_server.configuration.declaration import FeatureSettings
from lmi_server.configuration.options import NonNegativeInt, PositiveInt, Seconds


class BatchSettings(FeatureSettings):
    after = "model_url_pattern"

    batches_store: StorePlace = Field(
        None,
        description="Directory or s3://bucket/prefix for the files and batches of /v1/files and /v1/batches; there are "
        "no such paths if not set. Servers that share it share the work.",
    )
    batches_max_file_size: PositiveInt = Field(209715200, description="Largest file of /v1/files in bytes.")
    batches_max_size: PositiveInt = Field(
        10737418240,
        description="Bytes of the files of one API key together, with uploads that have not ended, from which on no "
        "further one is taken.",
    )
    batches_max_requests: PositiveInt = Field(50000, description="Most lines of the input of a batch.")
    batches_max_unfinished: PositiveInt = Field(
        100, description="Most batches of one API key that wait or run; further ones are refused with 429."
    )
    batches_max_kept: PositiveInt = Field(
        10000,
        description="Batches of one API key that are kept at most, ended ones included. A further one takes the "
        "place of the oldest that has ended, whose files stay.",
    )
    batches_concurrency: PositiveInt = Field(
        64, description="Most lines of batches that a model has at a time while it has no other requests."
    )
    batches_beside_live: NonNegativeInt = Field(
        0,
        description="Lines of batches that a model has at a time beside other requests; with 0 they run only in the "
        "gaps between these.",
    )
    batches_lifetime: Seconds = Field(
        2592000.0, description="Seconds after which files, and batches that have ended, are removed."
    )
