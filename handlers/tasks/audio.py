"""Decodes sound files to the samples that a model takes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from handlers.tasks.task import file_bytes
from lmi_server.contract.errors import ModelLoadError, RequestError


def audio_reader(sampling_rate: int) -> Callable[[Any], Any]:
    """Return a function that decodes a sound file to float32 samples (samples,) of one channel at `sampling_rate` Hz.

    The function takes the bytes of a WAV, FLAC, OGG or MP3 file, or them as base64, and raises RequestError for
    anything else. Raises ModelLoadError if the packages for it are not installed.
    """
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise ModelLoadError(f"sound needs the extra 'tasks' ({error}); install lmi-server[tasks]") from error

    def read(value: Any) -> Any:
        data = file_bytes(value, "audio")
        try:
            samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise RequestError(f"inputs is no sound file: {error}; send the bytes of a WAV, FLAC, OGG or MP3") from None
        if not len(samples):
            raise RequestError("inputs is a sound without samples; send a longer one")
        mono = samples.mean(axis=1)
        return mono if rate == sampling_rate else soxr.resample(mono, rate, sampling_rate)

    return read
