"""Decodes sound files to the samples that a model takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from handlers.tasks.task import file_bytes
from lmi_server.contract.errors import ModelLoadError
from lmi_server.media.sounds import read_sound


def audio_reader(sampling_rate: int) -> Callable[[Any], Any]:
    """Return a function that decodes a sound file to float32 samples (samples,) of one channel at `sampling_rate` Hz.

    The function takes the bytes of a WAV, FLAC, OGG or MP3 file, or them as base64, and raises RequestError for
    anything else. Raises ModelLoadError if the packages for it are not installed.
    """
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except ImportError as error:
        raise ModelLoadError(f"sound needs the extra 'tasks' ({error}); install lmi-server[tasks]") from error

    def read(value: Any) -> Any:
        return read_sound("inputs", file_bytes(value, "audio"), sampling_rate)

    return read
