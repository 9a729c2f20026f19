"""Media that requests name by URL: no connection to a private address, whatever name or redirect leads there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from relay_helpers import on_loop

pytestmark = pytest.mark.slow  # imports vLLM


class Site(BaseHTTPRequestHandler):
    """Answers /redirect with a redirect to the same port of 127.0.0.2, everything else with a text."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(302 if self.path == "/redirect" else 200)
        self.send_header("location", f"http://127.0.0.2:{self.server.server_port}/secret")  # type: ignore[attr-defined]
        self.send_header("content-length", "6")
        self.end_headers()
        self.wfile.write(b"secret")

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[int]:
    """Serve on every address of this machine; return the port."""
    Site.paths.clear()
    with ThreadingHTTPServer(("0.0.0.0", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


class Text:
    """Stands for vLLM's reader of images."""

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def get_max_bytes(self) -> int | None:
        return None


def connector(name: str, **arguments: Any) -> Any:
    from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY

    import handlers.vllm.requests.media  # noqa: F401 - registers the connectors

    return MEDIA_CONNECTOR_REGISTRY.load(name, **arguments)


@on_loop
async def test_private_addresses_get_no_request(site: int) -> None:
    from vllm.exceptions import VLLMClientError

    public = connector("lmi_public")
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "127.1"):
        url = f"http://{host}:{site}/image"
        with pytest.raises(VLLMClientError, match=r"allow_private_media|Invalid URL"):
            await public.load_from_url_async(url, Text())
        with pytest.raises(VLLMClientError, match=r"allow_private_media|Invalid URL"):
            public.load_from_url(url, Text())
    assert Site.paths == []
    await (await public.connection.get_async_client()).close()


@on_loop
async def test_a_redirect_leads_to_no_private_address(site: int) -> None:
    from vllm.exceptions import VLLMClientError

    from handlers.vllm.requests.media import PublicConnection

    connection = PublicConnection(allows=lambda address: address == "127.0.0.1")
    url = f"http://127.0.0.1:{site}"
    assert await connection.async_get_bytes(f"{url}/image", allow_redirects=True) == b"secret"
    with pytest.raises(VLLMClientError, match="allow_private_media"):
        await connection.async_get_bytes(f"{url}/redirect", allow_redirects=True)
    assert Site.paths == ["/image", "/redirect"]
    await (await connection.get_async_client()).close()


@on_loop
async def test_private_addresses_and_hosts_can_be_allowed(site: int) -> None:
    from vllm.exceptions import VLLMClientError

    everything = connector("lmi_any", allowed_media_domains=["localhost"])
    assert await everything.load_from_url_async(f"http://localhost:{site}/image", Text()) == b"secret"
    with pytest.raises(VLLMClientError, match="allowed domains"):
        await everything.load_from_url_async(f"http://127.0.0.1:{site}/image", Text())
    await (await everything.connection.get_async_client()).close()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:a9fe:a9fe::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    from lmi_server.media.public_addresses import is_public

    assert is_public(address) is public


def test_options() -> None:
    from handlers.vllm.description import VllmEngine
    from handlers.vllm.options import VllmOptions
    from lmi_server.configuration.handlers import HANDLERS

    spec = HANDLERS.by_title("vllm")
    variables = VllmEngine(spec, VllmOptions(model_id="m")).worker_environment()
    assert variables["VLLM_MEDIA_CONNECTOR"] == "lmi_public"
    assert "VLLM_MEDIA_URL_ALLOW_REDIRECTS" not in variables
    assert VllmOptions(model_id="m").engine_arguments()["scheduling_policy"] == "priority"
    in_turn = VllmOptions.restore({"model_id": "m"}, {"scheduling_policy": "fcfs"})
    assert in_turn.engine_arguments()["scheduling_policy"] == "fcfs"
    narrow = VllmOptions(model_id="m", allowed_media_domains=("a.example",), allow_private_media=True)
    assert narrow.engine_arguments()["allowed_media_domains"] == ["a.example"]
    variables = VllmEngine(spec, narrow).worker_environment()
    assert variables["VLLM_MEDIA_CONNECTOR"] == "lmi_any"
    assert variables["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
