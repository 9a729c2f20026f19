"""An echo, or a stream, in Ray Serve with one replica, which takes more than Ray's default of 5 requests at once."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse


@serve.deployment(num_replicas=1, max_ongoing_requests=128)
class Echo:
    async def __call__(self, request: Request) -> Any:
        return await request.json()


@serve.deployment(num_replicas=1, max_ongoing_requests=128)
class Stream:
    def __init__(self, chunks: int) -> None:
        self.chunks = chunks

    async def __call__(self, request: Request) -> StreamingResponse:
        await request.json()
        return StreamingResponse(_lines(self.chunks), media_type="application/jsonlines")


def _lines(chunks: int) -> Iterator[str]:
    for index in range(chunks):
        yield json.dumps({"token": index}) + "\n"


if __name__ == "__main__":
    port, directory, chunks = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20, _temp_dir=directory)
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": int(port)},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        serve.run(Stream.bind(int(chunks)) if int(chunks) else Echo.bind())
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()
