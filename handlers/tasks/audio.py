"""Sound files as the samples that a model listens to."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from handlers.tasks.task import file_bytes
from lmi_server.contract.errors import ModelLoadError, RequestError


def audio_reader(sampling_rate: int) -> Callable[[Any], Any]:
    """Return what reads a sound file (WAV, FLAC, OGG, MP3) as float32 samples of one channel at `sampling_rate` Hz.

    Raises ModelLoadError where the packages for it are missing.
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
