"""One sound on its way to a text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any


class Transcription:
    """One sound of a request. `result` is None until the last step is done.

    `samples` (samples,) are float32; they are given up once the features are there, which are smaller. `duration` is in
    seconds. `on_text`, if there is one, gets the text so far as it grows, from the thread that computes. Set
    `cancelled` if nothing waits for the result any more.
    """

    def __init__(self, samples: Any, sampling_rate: int, parameters: Mapping[str, Any]) -> None:
        self.samples = samples
        self.duration = len(samples) / sampling_rate
        self.parameters = parameters
        self.result: dict[str, Any] | None = None
        self.on_text: Callable[[str], object] | None = None
        self.cancelled = False

    @property
    def key(self) -> Hashable:
        """The key of the next step: steps with equal keys may run together; None if it runs alone."""
        return None

    @property
    def rows(self) -> int:
        """How many sequences the next step computes."""
        return 1


class ChunkedTranscription(Transcription):
    """A sound in chunks; each is one step. `forward` and `finish` are arguments of the pipeline's methods."""

    def __init__(
        self,
        samples: Any,
        sampling_rate: int,
        parameters: Mapping[str, Any],
        chunks: Iterator[Any],
        forward: Mapping[str, Any],
        finish: Mapping[str, Any],
    ) -> None:
        super().__init__(samples, sampling_rate, parameters)
        self.chunks = chunks
        self.forward = forward
        self.finish = finish
        self.outputs: list[Any] = []


class GrowingText:
    """The text of a stream: `so_far` may be set in another thread."""

    def __init__(self) -> None:
        self.so_far = ""
        self._sent = ""

    def take(self) -> str:
        """Return what has come to the text since the last call."""
        so_far = self.so_far
        if not so_far.startswith(self._sent):
            return ""
        piece, self._sent = so_far[len(self._sent) :], so_far
        return piece
