"""Request handlers, called without a server, and inputs for them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from lmi_server.configuration.handlers import load
from lmi_server.configuration.resolve import resolve_model
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.handler import RequestHandler, Response
from lmi_server.contract.protocol import Input

LoadTask = Callable[..., tuple[RequestHandler, Path]]
"""Takes a task and options; returns its handler, loaded with a tiny model, and the directory of the model."""


def started(directory: Path, **options: str) -> RequestHandler:
    """Return the handler of the model in `directory`, loaded; `options` are without "option."."""
    model = resolve_model(directory, {}, {f"option.{name}": value for name, value in options.items()})
    handler: Any = load(model.handler)
    serving: RequestHandler = handler()
    serving.served_names = ("mine",)
    serving.start(model.model_dir, model.options)
    return serving


def request(body: Any, route: str = "invocations", **headers: str) -> Input:
    """Return a request; a body that is no bytes is sent as JSON. Headers are written with _ for -."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    properties = {name.replace("_", "-"): value for name, value in headers.items()}
    return Input(route, {"content-type": "application/json", **properties}, [("data", data)])


def ask(handler: RequestHandler, body: Any, route: str = "invocations", **headers: str) -> Any:
    """Return the answer to one request, decoded if it is JSON. Raises the error of a request that fails."""
    (outcome,) = handler.handle([request(body, route, **headers)])
    return content_of(outcome)


def content_of(outcome: Response | LmiServerError) -> Any:
    if isinstance(outcome, LmiServerError):
        raise outcome
    data = outcome.data if outcome.stream is None else b"".join(outcome.stream)
    kind = dict(outcome.headers)["content-type"]
    return json.loads(data) if kind == "application/json" else data.decode()


def png(seed: int = 0, size: tuple[int, int] = (30, 20)) -> bytes:
    """Return the file of a random image."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def wav(rate: int = 16000, seconds: float = 0.5) -> bytes:
    """Return the file of a tone."""
    return sound_file(tone(rate, seconds), rate)


def sound_file(samples: np.ndarray, rate: int = 16000, kind: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    """Return the file of samples."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def speech(seconds: float, seed: int = 0, rate: int = 16000) -> np.ndarray:
    """Return samples (samples,) of tones that change as syllables do, the same for the same seed."""
    random, count = np.random.default_rng(seed), int(rate * seconds)
    parts = np.arange(count) * 4 // rate  # four a second
    pitch, volume = (random.random(int(seconds * 4) + 1)[parts] for _ in range(2))
    return (np.sin(2 * np.pi * np.cumsum(200 + 2000 * pitch) / rate) * volume).astype(np.float32)


def tone(rate: int, seconds: float = 0.5) -> np.ndarray:
    times = np.arange(int(rate * seconds)) / rate
    return np.sin(2 * np.pi * (200 + 300 * times) * times).astype(np.float32)


def approximately(left: Any, right: Any, tolerance: float = 1e-5) -> bool:
    """Return whether two decoded answers are the same but for rounding."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(approximately(left[key], right[key], tolerance) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(partial(approximately, tolerance=tolerance), left, right))
    if isinstance(left, float) or isinstance(right, float):
        return abs(left - right) <= tolerance
    return bool(left == right)
