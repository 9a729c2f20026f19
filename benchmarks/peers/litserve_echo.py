"""An echo, or a stream, in LitServe with one worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import litserve


class Echo(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def predict(self, request: Any) -> Any:
        return request


class Stream(litserve.LitAPI):
    def __init__(self, chunks: int) -> None:
        super().__init__(stream=True)
        self.chunks = chunks

    def setup(self, device: str) -> None:
        pass

    def predict(self, request: Any) -> Iterator[dict[str, int]]:
        for index in range(self.chunks):
            yield {"token": index}

    def encode_response(self, output: Iterator[dict[str, int]]) -> Iterator[dict[str, int]]:
        yield from output


if __name__ == "__main__":
    port, _, chunks = sys.argv[1:]
    api = Stream(int(chunks)) if int(chunks) else Echo()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(port), log_level="warning", generate_client_file=False)
