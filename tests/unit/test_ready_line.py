"""The request with which the line of a ready server says how to try it."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.lifecycle.ready_line import ready_line
from lmi_server.configuration.resolve import resolve_model
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.serving.pool_settings import ModelStatus


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("automatic-speech-recognition", "/v1/audio/transcriptions"),
        ("text-classification", "/models/model"),
    ],
)
def test_a_model_is_tried_with_a_request_that_it_answers(task: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(f"option.task={task}")
    (tmp_path / "config.json").write_text("{}")
    fake_model: Any = SimpleNamespace(name="model", status=ModelStatus.HEALTHY, resolved=resolve_model(tmp_path, {}))
    fake_listener: Any = SimpleNamespace(url="http://h:1")
    words = shlex.split(ready_line([fake_listener], ServerSettings(api_keys="k"), [fake_model], {}).split("try: ")[1])
    assert words[:2] == ["curl", f"http://h:1{path}"]
    if task == "automatic-speech-recognition":
        assert words[2:] == ["-H", "Authorization: Bearer KEY", "-F", "file=@FILE", "-F", "model=model"]
