"""Images that a client sends to do harm, and slow servers that it names, under the rolling batch."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from image_helpers import ServedImages, data_url, noise
from relay_helpers import on_loop
from tiny_image_models import save_image_model
from waiting import wait_until

from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.images import files, intake
from handlers.rolling_batch.images.options import ImageOptions
from handlers.rolling_batch.images.reader import ImageReader, ReadImage
from lmi_server.contract.errors import ContextLengthError, PayloadTooLargeError, RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, SamplingParameters
from lmi_server.media.fetching import MAX_BYTES, TooLargeError

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


@on_loop
async def test_a_file_with_broken_exif_is_an_error_of_its_request(directory: Path) -> None:
    file = io.BytesIO()
    _CAT.save(file, "PNG", exif=b"no exif")

    served = await ServedImages.start(directory)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    with pytest.raises(RequestError, match="the image cannot be read for the model: SyntaxError: not a TIFF"):
        await ask(served, url)
    await served.handler.stop()


@on_loop
async def test_images_in_requests_do_not_wait_for_slow_servers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def slow(url: str, **limits: Any) -> bytes:
        goes_on.wait(60)
        raise OSError("too slow")

    monkeypatch.setattr(files, "fetch_bytes", slow)

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


def test_the_words_of_another_server_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str, **limits: Any) -> bytes:
        raise OSError("HTTP Error 404: \x1b[31m\n" + "a" * 8000)

    monkeypatch.setattr(files, "fetch_bytes", refused)
    with pytest.raises(RequestError) as error:
        files.ImageFiles(ImageOptions()).fetch(files.ImagePart("url", "http://a.example/"), 1)
    assert error.value.message.startswith(r"url: 'http://a.example/' cannot be fetched: HTTP Error 404: \x1b[31m\naaa")
    assert len(error.value.message) < 400


@on_loop
async def test_fetched_files_of_a_request_are_bounded_together(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def found(url: str, max_bytes: int, **limits: Any) -> bytes:
        fetched.append(url)
        if max_bytes < 600:
            raise TooLargeError
        return bytes(600)

    monkeypatch.setattr(files, "fetch_bytes", found)
    monkeypatch.setattr(intake, "MAX_BYTES", 1000)

    served = await ServedImages.start(directory)
    with pytest.raises(PayloadTooLargeError, match=r"content\[1\]\.image_url\.url: the files that a request names"):
        await ask(served, *(f"http://a.example/{number}" for number in range(5)))
    assert len(fetched) == 2
    await served.handler.stop()


@on_loop
async def test_files_of_all_requests_are_bounded_and_none_is_forgotten(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait for room before they fetch, and the file of a client that left counts until its thread is done."""
    goes_on, begun = threading.Semaphore(0), threading.Semaphore(0)
    running: list[str] = []

    def slow(url: str, **limits: Any) -> bytes:
        running.append(url)
        begun.release()
        goes_on.acquire(timeout=60)
        return png(noise(len(running)))

    monkeypatch.setattr(files, "fetch_bytes", slow)
    monkeypatch.setattr(intake, "_MAX_FETCHED", 2 * MAX_BYTES)

    served = await ServedImages.start(directory)

    asking = [asyncio.create_task(ask(served, f"http://slow.example/{number}")) for number in range(6)]
    for _ in range(2):
        await asyncio.to_thread(begun.acquire, timeout=60)
    assert served.stat("image_file_bytes") == 2 * MAX_BYTES
    asking[0].cancel()
    await asyncio.gather(asking[0], return_exceptions=True)
    assert served.stat("image_file_bytes") == 2 * MAX_BYTES
    assert len(running) == 2
    for _ in asking:
        goes_on.release()
    ends = await asyncio.gather(*asking[1:])
    assert all(end[-1].finish_reason for end in ends)
    assert served.stat("image_file_bytes") == 0
    await served.handler.stop()


def test_an_address_that_does_not_answer_is_refused_with_the_remedy() -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/cat.jpg"
        images = files.ImageFiles(HuggingFaceOptions(model_id="m", allow_private_media=True))
        with pytest.raises(RequestError) as refused:
            images.fetch(files.ImagePart("messages[0]", url), 1)
    assert "Connection refused; send a data: URL" in refused.value.message
    assert "<" not in refused.value.message


def test_a_failed_fetch_keeps_nothing_alive() -> None:
    """The error would hold its traceback, that the room, and the room the fetch with the error."""

    def fails() -> bytes:
        raise RequestError("the URL cannot be fetched")

    async def run() -> weakref.ref[RequestError]:
        with ThreadPoolExecutor(1) as pool:
            try:
                async with files.FileRoom(1).reserve(1) as room:
                    await room.fetched(pool.submit(fails))
            except RequestError as error:
                return weakref.ref(error)
        raise AssertionError("the fetch did not fail")

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()


@on_loop
async def test_images_beyond_the_context_are_not_all_processed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = ImageReader.process

    def process(self: ImageReader, image: Any, alone: bool) -> ReadImage:
        read.append("image")
        return original(self, image, alone)

    served = await ServedImages.start(directory)
    monkeypatch.setattr(ImageReader, "process", process)
    monkeypatch.setattr(served.handler._intake._images, "_limit", 20)
    with pytest.raises(ContextLengthError):
        await ask(served, *(data_url(noise(number)) for number in range(16)))
    assert 0 < len(read) < 16
    await served.handler.stop()


@on_loop
async def test_clients_that_leave_queue_no_images(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread has of a client that has left takes memory until it is done; the next one waits for its turn."""
    goes_on, begun = threading.Event(), threading.Event()
    original = ImageReader.read

    def slow(self: ImageReader, *arguments: Any) -> ReadImage:
        begun.set()
        goes_on.wait(60)
        return original(self, *arguments)

    async def leave(asking: list[asyncio.Task[list[Delta]]]) -> None:
        await asyncio.sleep(0.05)
        for one in asking:
            one.cancel()
        await asyncio.sleep(0.05)
        assert [one.done() for one in asking] == [False] + [True] * (len(asking) - 1)

    served = await ServedImages.start(directory)
    monkeypatch.setattr(ImageReader, "read", slow)
    images = served.handler._intake._images
    asking = [asyncio.create_task(ask(served, data_url(noise(number)))) for number in range(10, 16)]
    await asyncio.to_thread(begun.wait, 60)
    await leave(asking)
    assert images is not None
    assert images._reading._work_queue.qsize() == 0
    goes_on.set()
    await asyncio.gather(*asking, return_exceptions=True)
    monkeypatch.setattr(ImageReader, "read", original)

    goes_on.clear()
    busy = asyncio.create_task(served.handler._loop.call(lambda: goes_on.wait(60)))
    first = [asyncio.create_task(ask(served, data_url(noise(20))))]
    commands = served.handler._loop._commands
    await asyncio.to_thread(wait_until, lambda: len(commands) == 1, "the first image waits for the engine")
    await leave(first + [asyncio.create_task(ask(served, data_url(noise(number)))) for number in range(21, 26)])
    assert len(commands) == 1
    goes_on.set()
    await asyncio.gather(busy, *first, return_exceptions=True)
    assert (await ask(served, data_url(noise(30))))[-1].finish_reason
    await served.handler.stop()


def png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
