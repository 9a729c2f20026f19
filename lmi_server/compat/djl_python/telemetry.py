"""Logs how many draft tokens of speculative decoding are accepted, in the form that `sm_log_filter` counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

SPECULATIVE_FREQUENCY_SEC = 30.0


class TelemetryManager:
    """Adds up what an engine reports, and logs the mean at most every `SPECULATIVE_FREQUENCY_SEC` seconds."""

    def __init__(self) -> None:
        self.reset_speculative()

    def record_speculative(self, data: Mapping[str, Any]) -> None:
        """Add a request: `mean_acceptance` over `acceptance_history_len` steps."""
        steps = data["acceptance_history_len"]
        self.speculative_acceptance_rate_count += steps
        self.speculative_acceptance_rate_total += steps * data["mean_acceptance"]
        if time.time() - self.speculative_sent_time > SPECULATIVE_FREQUENCY_SEC:
            self._log_mean()
            self.reset_speculative()

    def reset_speculative(self) -> None:
        self.speculative_sent_time = time.time()
        self.speculative_acceptance_rate_count = 0
        self.speculative_acceptance_rate_total = 0.0

    def _log_mean(self) -> None:
        if self.speculative_acceptance_rate_count:
            mean = self.speculative_acceptance_rate_total / self.speculative_acceptance_rate_count
            # In the message itself: SMLogFilter reads messages before their arguments are filled in.
            logger.info(f"ModelServerTelemetry: Speculative Decoding Mean Acceptance: {mean} rate")


telemetry_manager = TelemetryManager()
