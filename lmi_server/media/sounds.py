"""Decodes the files of sounds, piece by piece: what their heads promise is not relied on."""

from __future__ import annotations

import io
from typing import Any

from lmi_server.contract.errors import RequestError
from lmi_server.media.budget import current_budget

FORMATS = ("AIFF", "AU", "FLAC", "MP3", "OGG", "RF64", "WAV", "WAVEX")
_PIECE = 1 << 18  # samples of all channels together
_SAMPLE_SIZE = 4
# A sound is mixed to one channel and resampled as it is decoded. That takes time for the whole file, and memory for the
# result, which is smaller.
_TIME_SHARE = 16
_LOUDEST = 1e6  # 1 is full scale; squares of more are no float32 any more, and make a model's numbers no numbers
_RATES = range(1000, 1_000_000)  # Hz, of a file


def read_sound(name: str, data: bytes, sampling_rate: int) -> Any:
    """Return the float32 samples (samples,) of a request's field, mixed to one channel at `sampling_rate` Hz.

    Raises RequestError if it is no sound, and PayloadTooLargeError if it would take too much.
    """
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            _check(name, sound)
            samples = _mix(name, sound, sampling_rate)
    except soundfile.LibsndfileError as error:
        reason = error.error_string.rstrip(".")
        raise RequestError(f"{name} is no sound file: {reason}; send the bytes of a WAV, FLAC, OGG or MP3") from None
    if not len(samples):
        raise RequestError(f"{name} is a sound without samples; send a longer one")
    return samples


def _check(name: str, sound: Any) -> None:
    if sound.format not in FORMATS:
        raise RequestError(f"{name} is a sound in {sound.format}; send a file in one of {', '.join(FORMATS)}")
    if sound.samplerate not in _RATES:
        raise RequestError(
            f"{name} is a sound with {sound.samplerate} samples a second; send one with {_RATES.start} or more, and "
            f"less than {_RATES.stop}"
        )


def _mix(name: str, sound: Any, sampling_rate: int) -> Any:
    import numpy as np
    import soxr

    budget = current_budget()
    rate, channels = sound.samplerate, sound.channels
    what = f"a sound with {channels} channels and {rate} samples a second"
    stream = None if rate == sampling_rate else soxr.ResampleStream(rate, sampling_rate, 1, dtype="float32")
    mixed = bytearray()
    while True:
        piece = sound.read(max(1, _PIECE // channels), dtype="float32", always_2d=True)
        kept = len(piece) * sampling_rate // rate
        budget.take(_SAMPLE_SIZE * max(kept, piece.size // _TIME_SHARE), what)
        mono = piece.mean(axis=1) if len(piece) else np.zeros(0, np.float32)
        if not (np.abs(mono) <= _LOUDEST).all():
            raise RequestError(f"{name} has samples that are no numbers or above {_LOUDEST:g}; send them from -1 to 1")
        mixed += mono.tobytes() if stream is None else stream.resample_chunk(mono, last=not len(piece)).tobytes()
        if not len(piece):
            return np.frombuffer(mixed, np.float32)
