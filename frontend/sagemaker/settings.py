"""The settings of SageMaker's runtime API and of asynchronous jobs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmi_server.configuration.declaration import Allowed, FeatureSettings
from lmi_server.configuration.options import PositiveInt, Seconds

S3Path = Annotated[str | None, Field(pattern=r"^s3://[^/]+(/.*)?$"), Allowed("s3://bucket/prefix")]


class SignatureSettings(FeatureSettings):
    after = "management_api_keys_file"
    secrets = ("sigv4_keys",)

    sigv4_keys: str | None = Field(
        None,
        description="Access keys of boto3's clients, ACCESS_KEY_ID:SECRET_KEY with commas between: /endpoints/ then "
        "takes only requests that are signed with one of them. If not set, no signature is read.",
    )
    sigv4_region: str = Field("us-east-1", description="Region that the signatures must be for.")


class JobSettings(FeatureSettings):
    after = "model_url_pattern"

    memory_cache_capacity: PositiveInt = Field(
        1000, description="Most asynchronous jobs (x-synchronous: false) that run or whose answers are in memory."
    )
    async_jobs_size: PositiveInt = Field(
        1073741824,
        description="Bytes of answers of asynchronous jobs and invocations in memory, from which on no further job is "
        "taken and an answer that grows is given up (503).",
    )
    async_jobs_lifetime: Seconds = Field(
        3600.0, description="Seconds for which the answer of an asynchronous job is kept."
    )
    async_jobs_dir: str | None = Field(
        None, description="Directory that keeps the answers of asynchronous jobs over a restart."
    )
    async_output_path: S3Path = Field(
        None, description="Where InvokeEndpointAsync of boto3's sagemaker-runtime puts its outputs."
    )
    async_input_path: S3Path = Field(
        None, description="Where its inputs must be; the bucket of async_output_path if not set."
    )
    s3_cache: bool = Field(False, description="Keep the answers of asynchronous jobs on S3.")
    s3_cache_bucket: str | None = Field(None, description="Bucket for s3_cache.")
    s3_cache_key_prefix: str = Field("", description="What the names of the objects of s3_cache begin with.")
    s3_cache_autocreate: bool = Field(False, description="Make s3_cache_bucket if it is not there.")
    ddb_cache: bool = Field(False, description="Keep the answers of asynchronous jobs in DynamoDB.")
    ddb_table_name: str = Field("djl-serving", description="Table for ddb_cache; it is made if it is not there.")
