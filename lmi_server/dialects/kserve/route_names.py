"""The routes of the Open Inference Protocol: /v2/models/{model}/infer and its generate extension."""

from __future__ import annotations

INFER = "v2/infer"
V2_GENERATE = "v2/generate"
V2_GENERATE_STREAM = "v2/generate_stream"
