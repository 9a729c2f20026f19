"""The settings of models that sleep."""

from __future__ import annotations

from pydantic import Field

from lmi_server.configuration.declaration import FeatureSettings
from lmi_server.configuration.options import Seconds


class SleepSettings(FeatureSettings):
    after = "reload_on_change"

    wake_on_request: bool = Field(
        False,
        description="A request wakes a model that /sleep has put to sleep, and waits until it is awake, with up to "
        "job_queue_size others. If false, it is answered with 503.",
    )
    sleep_timeout: Seconds = Field(
        300.0,
        description="Seconds that a worker has to fall asleep, to wake up, or to reset its prefix cache. One that does "
        "not fall asleep or wake up in time is started again.",
    )
