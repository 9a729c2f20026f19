"""boto3's client of SageMaker endpoints, pointed at a server of a test."""

from __future__ import annotations

from typing import Any

ACCESS_KEY, SECRET_KEY = "AKIAEXAMPLE", "planted-secret"


def sagemaker_runtime(port: int, **more: Any) -> Any:
    """Return a client of the server on this port, which asks once; `more` are arguments of boto3.client."""
    import boto3
    from botocore.config import Config

    given = {
        "region_name": "us-east-1",
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "config": Config(retries={"total_max_attempts": 1}, read_timeout=120),
    }
    return boto3.client("sagemaker-runtime", endpoint_url=f"http://127.0.0.1:{port}", **given | more)
