"""The options of a model that reads images under the rolling batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

from handlers.generation.media_options import MediaOptions
from lmi_server.configuration.declaration import Allowed, Conflict
from lmi_server.configuration.options import JsonObject, PositiveFloat
from lmi_server.configuration.references import NAMES_NOTHING

_LIMIT_KEY = "option.limit_mm_per_prompt"
_MAX_IMAGES = 16


class ImageOptions(MediaOptions):
    """Keys of serving.properties for images in prompts."""

    limit_mm_per_prompt: Annotated[JsonObject | None, NAMES_NOTHING, Allowed('a JSON object such as {"image": 4}')] = (
        None
    )
    """Maximum number of images per prompt, as {"image": 4}; 16 if not set."""
    image_cache_gb: PositiveFloat = 1.0
    """GiB of encoded images that are kept, so that an image that comes again is not encoded again. Requests with
    further images wait while running ones hold more."""

    @property
    def max_images(self) -> int:
        """Images that a prompt may have."""
        limits = json.loads(self.limit_mm_per_prompt or "{}")
        return int(limits.get("image", _MAX_IMAGES))

    def image_conflicts(self) -> Iterator[Conflict]:
        """Yield a conflict if the limits are not numbers of what the model can read."""
        for kind, limit in json.loads(self.limit_mm_per_prompt or "{}").items():
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                yield Conflict((_LIMIT_KEY,), f"an integer of 0 or more as the limit of {kind}")
            elif kind != "image" and limit:
                yield Conflict((_LIMIT_KEY,), f"a limit of image alone; this handler reads no {kind}")
