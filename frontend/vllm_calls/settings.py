"""The setting of models that sleep."""

from __future__ import annotations

from pydantic import Field

from lmi_server.configuration.declaration import FeatureSettings


class SleepSettings(FeatureSettings):
    after = "reload_on_change"

    wake_on_request: bool = Field(
        False,
        description="A request wakes a model that /sleep has put to sleep, and waits until it is awake. If false, it "
        "is answered with 503.",
    )
