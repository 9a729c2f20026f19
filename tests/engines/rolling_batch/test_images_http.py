"""Images over HTTP to models under the rolling batch: each API's form, streams, and what a client must not do."""

from __future__ import annotations

import base64
import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from image_helpers import Reference, data_url, noise, openai_parts
from PIL import Image
from product_helpers import Server, serving
from tiny_image_models import save_image_model

pytestmark = pytest.mark.slow

CAT, DOG = noise(1), noise(2)
PARTS = ["what is ", CAT, "here"]
TOKENS = 6
_STATS_INTERVAL_S = 1.0  # of a worker


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model("qwen2_5_vl", tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"dtype": "fp32", "limit_mm_per_prompt": '{"image": 4}', "max_media_size": str(4 << 20)}
    with serving(tmp_path_factory.mktemp("served"), directory, libraries="transformers", **options) as server:
        yield server


@pytest.fixture(scope="module")
def expected(reference: Reference) -> str:
    return str(reference.tokenizer.decode(reference.generate(PARTS, TOKENS), skip_special_tokens=True))


def ask(server: Server, *parts: Any, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": TOKENS, "temperature": 0, **more}
    return server.http.post("/v1/chat/completions", json=body)


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def file_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    return url_part(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def message(reply: Any, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["message"])


# The penalty without which a random model says the same of every image.
PENALTY = {"repetition_penalty": 2.0}


def test_openais_client(server: Server, expected: str) -> None:
    import openai

    client = server.clients.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"))
    messages: Any = [{"role": "user", "content": openai_parts(PARTS)}]
    asked: Any = {"model": server.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    answer = client.chat.completions.create(**asked, extra_body=PENALTY)
    assert answer.choices[0].message.content == expected
    stream = client.chat.completions.create(**asked, extra_body=PENALTY, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == expected
    other = client.chat.completions.create(
        **{**asked, "messages": [{"role": "user", "content": openai_parts(["what is ", DOG, "here"])}]},
        extra_body=PENALTY,
    )
    assert other.choices[0].message.content != expected


def test_openais_responses(server: Server) -> None:
    import openai

    client = server.clients.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"))
    content: Any = [{"type": "input_text", "text": "what"}, {"type": "input_image", "image_url": data_url(CAT)}]
    answer = client.responses.create(
        model=server.model, input=[{"role": "user", "content": content}], max_output_tokens=TOKENS, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens > 28


def test_anthropics_client(server: Server) -> None:
    import anthropic

    client = server.clients.enter_context(anthropic.Anthropic(base_url=server.url, api_key="none"))
    encoded = data_url(CAT).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what"}]
    asked: Any = {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "extra_body": {"temperature": 0},
    }
    answer = client.messages.create(**asked)
    block: Any = answer.content[0]
    assert answer.usage.input_tokens > 28
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
    counted = client.messages.count_tokens(model=server.model, messages=asked["messages"])
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_lmis_invocations(server: Server, expected: str) -> None:
    body = {"messages": [{"role": "user", "content": openai_parts(PARTS)}], "max_tokens": TOKENS, "temperature": 0}
    reply = server.http.post("/invocations", json={**body, **PENALTY})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == expected


def test_text_in_every_form_needs_no_image(server: Server, reference: Reference) -> None:
    expected = reference.tokenizer.decode(reference.generate(["no image"], TOKENS), skip_special_tokens=True)
    for content in ("no image", [{"type": "text", "text": "no image"}]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, **PENALTY}
        reply = server.http.post("/v1/chat/completions", json=body)
        assert reply.json()["choices"][0]["message"]["content"] == expected
    reply = server.http.post("/invocations", json={"inputs": "no image", "parameters": {"max_new_tokens": 4}})
    assert reply.status_code == 200


def test_images_are_counted(server: Server) -> None:
    time.sleep(2 * _STATS_INTERVAL_S)  # then the images of the tests before are in the gauge
    before = server.gauge("lmi_handler_encoded_images_total") or 0.0
    image = noise(77)
    for _ in range(2):
        assert ask(server, url_part(data_url(image))).status_code == 200
    server.wait_for("lmi_handler_encoded_images_total", before + 1)


# --- what a client must not do ---


def huge_png(width: int, height: int) -> bytes:
    """Return a file of a few bytes that says it has so many pixels."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", head) + piece(b"IDAT", zlib.compress(b"")) + piece(b"IEND", b"")


def png(image: Image.Image = CAT) -> bytes:
    return base64.b64decode(data_url(image).partition(",")[2])


@pytest.mark.parametrize(
    ("part", "status", "said"),
    [
        (file_part(huge_png(60_000, 60_000)), 413, "60000"),
        (file_part(huge_png(3_000, 2_000)), 413, "option.max_media_size=4194304"),
        (file_part(huge_png(1_000_000, 1)), 400, "image"),
        (file_part(png()[:200]), 400, "cannot be read"),
        (file_part(b""), 400, "not an image of a known format"),
        (file_part(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), 400, "not an image of a known format"),
        (url_part("data:image/png;base64,@@@"), 400, "is not base64"),
        (url_part("data:image/png,abc"), 400, "is not allowed; send a data: URL with base64"),
        (url_part("file:///etc/passwd"), 400, "is not allowed; send a data: URL with base64"),
        (url_part("ftp://example.com/a.png"), 400, "is not allowed; send a data: URL with base64"),
        (url_part("/etc/passwd"), 400, "is not allowed; send a data: URL with base64"),
        (url_part("http://127.0.0.1:1/a.png"), 400, "option.allow_private_media"),
        (url_part("http://169.254.169.254/latest/meta-data"), 400, "option.allow_private_media"),
        ({"type": "image_url", "image_url": {}}, 400, "must be an object with a url"),
        ({"type": "image_url", "image_url": 7}, 400, "must be an object with a url"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, 400, "send text or image_url"),
        ({"type": "input_audio", "input_audio": {}}, 400, "send text or image_url"),
    ],
)
def test_what_is_no_image_is_an_error_of_the_request(server: Server, part: Any, status: int, said: str) -> None:
    assert said in message(ask(server, part), status)
    assert ask(server, {"type": "text", "text": "still there"}).status_code == 200


def test_an_animation_counts_as_its_first_frame(server: Server) -> None:
    file = io.BytesIO()
    CAT.save(file, "GIF", save_all=True, append_images=[DOG] * 200)
    first = io.BytesIO()
    CAT.save(first, "GIF")
    answers = [ask(server, file_part(data.getvalue(), "gif"), **PENALTY) for data in (file, first)]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_of_pixels_is_read(server: Server, mode: str) -> None:
    image = Image.new("I;16", (40, 40)) if mode == "I;16" else CAT.convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF" if mode == "CMYK" else "PNG")
    assert ask(server, file_part(file.getvalue())).status_code == 200


def test_many_images_are_refused_before_any_is_read(server: Server) -> None:
    part = url_part(data_url(Image.new("RGB", (1, 1))))
    said = message(ask(server, *[part] * 10_000), 400)
    assert "10000 images are more than option.limit_mm_per_prompt allows (4)" in said
    assert ask(server, *[part] * 4).status_code == 200


def test_a_body_of_100_megabytes_is_refused(server: Server) -> None:
    part = url_part("data:image/png;base64," + "A" * 100_000_000)
    assert ask(server, part).status_code == 413


def test_the_models_own_token_in_a_text_stands_for_no_image(server: Server) -> None:
    text = {"type": "text", "text": "<|image_pad|>"}
    assert "<|image_pad|>" in message(ask(server, url_part(data_url(CAT)), text), 400)
    assert ask(server, text).status_code == 200


def test_a_text_that_is_cut_takes_no_images(server: Server) -> None:
    said = message(ask(server, url_part(data_url(CAT)), truncate_prompt_tokens=3), 400)
    assert "truncate" in said


class _Files(BaseHTTPRequestHandler):
    """Serves an image, and a redirect to another host."""

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/a.png")  # type: ignore[attr-defined]
            self.end_headers()
            return
        data = png()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


def test_files_come_from_the_hosts_that_the_options_allow(directory: Path, tmp_path: Path, expected: str) -> None:
    files = HTTPServer(("127.0.0.1", 0), _Files)
    threading.Thread(target=files.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{files.server_port}"
    options = {"dtype": "fp32", "allow_private_media": "true", "allowed_media_domains": "127.0.0.1"}
    try:
        with serving(tmp_path, directory, libraries="transformers", **options) as server:
            parts = [
                {"type": "text", "text": "what is "},
                url_part(f"{address}/a.png"),
                {"type": "text", "text": "here"},
            ]
            reply = ask(server, *parts, **PENALTY)
            assert reply.json()["choices"][0]["message"]["content"] == expected
            for url in (f"{address}/elsewhere", f"http://localhost:{files.server_port}/a.png"):
                assert "option.allowed_media_domains" in message(ask(server, url_part(url)), 400)
    finally:
        files.shutdown()
        files.server_close()
