"""Images that a client sends to do harm, and slow servers that it names, under the rolling batch."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from pathlib import Path
from typing import Any

import pytest
from image_helpers import ServedImages, data_url, noise
from tiny_image_models import save_image_model

from handlers.rolling_batch.images import files, intake
from lmi_server.contract.errors import PayloadTooLargeError, RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, SamplingParameters

_CAT = noise(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model("llava", tmp_path_factory.mktemp("llava"))


async def ask(served: ServedImages, *urls: str) -> list[Delta]:
    """Return the answer to a chat with the images that URLs name."""
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    request = GenerationRequest(
        request_id="same",
        prompt=None,
        messages=[{"role": "user", "content": content}],
        sampling=SamplingParameters(max_new_tokens=2),
    )
    return [delta async for delta in served.handler.generate(request)]


def test_a_file_with_broken_exif_is_an_error_of_its_request(directory: Path) -> None:
    file = io.BytesIO()
    _CAT.save(file, "PNG", exif=b"no exif")

    async def run() -> None:
        served = await ServedImages.start(directory)
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        with pytest.raises(RequestError, match="the image cannot be read for the model: SyntaxError: not a TIFF"):
            await ask(served, url)
        await served.handler.stop()

    asyncio.run(run())


def test_images_in_requests_do_not_wait_for_slow_servers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def slow(url: str, **limits: Any) -> bytes:
        goes_on.wait(60)
        raise OSError("too slow")

    monkeypatch.setattr(files, "fetch_bytes", slow)

    async def run() -> None:
        served = await ServedImages.start(directory)
        others = [asyncio.create_task(ask(served, "http://slow.example/a")) for _ in range(8)]
        await asyncio.sleep(0)
        answer = await ask(served, data_url(_CAT))
        assert answer[-1].finish_reason
        assert not any(other.done() for other in others)
        goes_on.set()
        ends = await asyncio.gather(*others, return_exceptions=True)
        assert all(isinstance(end, RequestError) for end in ends)
        await served.handler.stop()

    asyncio.run(run())


def test_fetched_files_of_a_request_are_bounded_together(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def found(url: str, **limits: Any) -> bytes:
        fetched.append(url)
        return bytes(600)

    monkeypatch.setattr(files, "fetch_bytes", found)
    monkeypatch.setattr(intake, "MAX_BYTES", 1000)

    async def run() -> None:
        served = await ServedImages.start(directory)
        with pytest.raises(PayloadTooLargeError, match=r"content\[1\]\.image_url\.url: the files that a request names"):
            await ask(served, *(f"http://a.example/{number}" for number in range(5)))
        assert len(fetched) == 2
        await served.handler.stop()

    asyncio.run(run())
