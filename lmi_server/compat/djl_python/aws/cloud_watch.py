"""Counts events in Amazon CloudWatch."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

_NAMESPACE = "DJLServing_sessions"


class CloudWatch:
    """Without boto3 (`client` is None) events are logged instead."""

    def __init__(self) -> None:
        self.client: Any = None
        try:
            import boto3
        except ImportError as error:
            logger.warning("events are logged, not sent to CloudWatch (%s); install lmi-server[s3]", error)
        else:
            self.client = boto3.client("cloudwatch")

    def post(self, key: str) -> None:
        """Count one event. A failure is logged, because the event itself has happened."""
        if self.client is None:
            logger.info("%s: 1", key)
            return
        try:
            metric = {"MetricName": key, "Unit": "Count", "Value": 1}
            self.client.put_metric_data(Namespace=_NAMESPACE, MetricData=[metric])
        except Exception as error:  # noqa: BLE001 - the border to boto3
            logger.warning("%s is not counted in CloudWatch: %s", key, error)
