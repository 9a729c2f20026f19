"""Who may manage models, what a registration may name, and what strangers and the log get to see."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_code_helpers import make_own
from server_helpers import Server, make_model, request, running
from waiting import wait_until

from frontend.access.web_pages import pages_of_management, pages_of_requests
from frontend.http.clients import is_local, remote_sign, shown_error, shown_path, without_directories
from frontend.observability.server_log import LineFormatter
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import HandlerError, PermissionDeniedError

REMOTE = {"x-forwarded-for": "203.0.113.7"}  # what a proxy on this machine says of a client elsewhere
RAISING = """
def handle(inputs):
    if not inputs.is_empty():
        raise ValueError(f'not this: größe {__file__}')
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("access")
    make_model(directory / "store" / "first")
    make_own(directory / "store" / "raising", RAISING)
    make_model(directory / "store" / "third")
    make_model(directory / "elsewhere")
    (directory / "store" / "broken").mkdir()
    (directory / "store" / "broken" / "serving.properties").write_text("option.dtype=hf_planted_secret")
    return directory


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    """Serve models of a store to clients of this machine, the default."""
    models = [home / "store" / name for name in ("first", "raising", "broken")]
    with running(*models, variables={"HF_TOKEN": "hf_planted_secret"}, workers=2) as server:
        yield server


@pytest.fixture(scope="module")
def opened(home: Path) -> Iterator[Server]:
    """Serve with a management API that is open to all clients, under one more name."""
    variables = {
        "SERVING_MANAGEMENT_CLIENTS": "any",
        "SERVING_ALLOWED_HOSTS": "models.example.com",
        "SERVING_MODEL_STORE": str(home / "store"),
        "SERVING_CORS_ALLOWED_ORIGIN": "https://console.example.com",
    }
    with running(home / "store" / "first", variables=variables, workers=1) as server:
        yield server


def refusal(server: Server, method: str, path: str, headers: dict[str, str], **more: Any) -> str:
    reply = server.http.request(method, path, headers=headers, **more)
    assert reply.status_code == 403, reply.text
    assert reply.json()["type"] == "ForbiddenException"
    return str(reply.json()["message"])


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"origin": "https://evil.example"}, "Origin"),
        ({"origin": "null"}, "Origin"),
        ({"origin": "http://127.0.0.1:1"}, "Origin"),
        ({"origin": "http://["}, "Origin"),
        ({"host": "[x]"}, "Host"),
        ({"sec-fetch-site": "cross-site"}, "other sites"),
        ({"sec-fetch-site": "same-site"}, "other sites"),
        ({"host": "evil.example:8080"}, "Host"),
        ({"host": "evil.example", "origin": "http://evil.example"}, "Host"),
        (REMOTE, "header x-forwarded-for says that a proxy sends this request; management_api_keys lets"),
        ({"forwarded": "for=203.0.113.7"}, "header forwarded says that"),
    ],
)
def test_a_page_or_another_machine_manages_nothing(
    server: Server, home: Path, headers: dict[str, str], named: str
) -> None:
    url = f"/models?url={home / 'elsewhere'}&option.entryPoint={home / 'x.py'}"
    assert named in refusal(server, "POST", url, headers)
    assert server.http.get("/models/elsewhere").status_code == 404
    for method, path in (
        ("GET", "/models"),
        ("GET", "/models/first"),
        ("PUT", "/models/first?min_worker=2"),
        ("DELETE", "/models/first"),
        ("GET", "/server/logging?level=debug"),
        ("GET", "/workflows"),
        ("POST", "/models/first/adapters?name=a&src=."),
        ("POST", "/models/first/reload"),
        ("POST", "/models/first/canary"),
        ("POST", "/models/first/canary/promote"),
        ("POST", "/models/first/canary/take_back"),
    ):
        assert named in refusal(server, method, path, headers)


def test_strangers_may_send_requests_and_anybody_may_ask_for_health(server: Server) -> None:
    assert server.http.post("/predictions/first", json=request("a"), headers=REMOTE).status_code == 200
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, REMOTE):
        for path in ("/ping", "/health/live", "/metrics"):
            assert server.http.get(path, headers=headers).status_code in (200, 500)


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"origin": "https://evil.example"}, "Origin"),
        ({"origin": "null"}, "Origin"),
        ({"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"}, "Origin"),
        ({"sec-fetch-site": "cross-site"}, "other sites"),
        ({"host": "evil.example:8080"}, "Host"),
        ({"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"}, "Host"),
    ],
)
def test_a_page_of_another_site_sends_no_requests(server: Server, headers: dict[str, str], named: str) -> None:
    plain = {"content-type": "text/plain", **headers}  # a page may send this without asking first
    assert named in refusal(server, "POST", "/predictions/first", plain, json=request("a"))
    assert named in refusal(server, "GET", "/predictions/first?inputs=a", headers)
    assert named in refusal(server, "GET", "/info", headers)
    chat = server.http.post("/v1/chat/completions", json={"messages": []}, headers=headers)
    assert (chat.status_code, named in chat.json()["error"]["message"]) == (403, True)
    invocation = server.http.post("/endpoints/first/async-invocations", json=request("a"), headers=headers)
    assert (invocation.status_code, named in invocation.json()["Message"]) == (403, True)
    for header in ({"x-synchronous": "false"}, {"x-starting-token": "a"}):
        assert named in refusal(server, "POST", "/predictions/first", {**plain, **header}, json=request("a"))
    reads = ("/v1/models", "/v1/models/first", "/version", "/v2", "/v2/models/first", "/v2/models/first/ready")
    for path in (*reads, "/invocations", "/models/first/invoke"):
        assert server.http.get(path, headers=headers).status_code == 403, path
    for path in ("/tokenize", "/generate", "/v1/embeddings", "/endpoints/first/invocations"):
        assert server.http.post(path, json=request("a"), headers=headers).status_code == 403, path


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:{port}"},
        {"origin": "http://ui.example", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"host": "localhost:{port}", "origin": "http://localhost:{port}"},
        {"host": "tunnel"},
        {"host": "model.localhost"},
        {"host": "[::1]:1"},
    ],
)
def test_pages_of_the_server_itself_send_requests(server: Server, headers: dict[str, str]) -> None:
    own = {name: value.format(port=server.port) for name, value in headers.items()}
    assert server.http.post("/predictions/first", json=request("a"), headers=own).status_code == 200


def test_cors_is_off_by_default(server: Server) -> None:
    asking = {"origin": "https://page.example", "access-control-request-method": "POST"}
    for method, path in (("GET", "/ping"), ("OPTIONS", "/predictions/first"), ("OPTIONS", "/models")):
        answer = server.http.request(method, path, headers=asking)
        assert [name for name in answer.headers if name.startswith("access-control")] == []


def test_settings_name_further_hosts_and_pages(opened: Server) -> None:
    for headers in ({"host": "models.example.com"}, {"origin": "https://console.example.com"}):
        assert opened.http.post("/predictions/first", json=request("a"), headers=headers).status_code == 200
    assert "Origin" in refusal(opened, "POST", "/predictions/first", {"origin": "https://evil.example"})


@pytest.mark.parametrize(
    ("host", "checked"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("unix:/run/lmi.sock", False)],
)
def test_pages_count_where_only_this_machine_reaches_the_server(host: str, checked: bool) -> None:
    assert (pages_of_requests(ServerSettings(host=host)) is not None) == checked


def test_cors_for_all_pages_opens_requests_and_not_the_management() -> None:
    settings = ServerSettings(cors_allowed_origin="*")
    for headers in (("https://a.example", "cross-site"), (None, "cross-site"), ("null", None)):
        pages_of_requests(settings).check("127.0.0.1", *headers)
        with pytest.raises(PermissionDeniedError):
            pages_of_management(settings).check("127.0.0.1", *headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost"},
        {"host": "lmi.localhost:8080"},
        {"host": "[::1]:8080"},
        {"host": "lmi-server"},
        {"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"},
    ],
)
def test_clients_of_this_machine_manage_as_before(server: Server, home: Path, headers: dict[str, str]) -> None:
    url = str(home / "elsewhere")
    assert server.http.post("/models", params={"url": url}, headers=headers).status_code == 200
    assert server.http.delete("/models/elsewhere", headers=headers).status_code == 200


def test_an_open_management_api_still_checks_hosts_and_pages(opened: Server) -> None:
    page = {**REMOTE, "origin": "https://console.example.com", "sec-fetch-site": "cross-site"}
    for headers in (REMOTE, {**REMOTE, "host": "models.example.com"}, page):
        assert opened.http.get("/models", headers=headers).status_code == 200
    assert "allowed_hosts" in refusal(opened, "GET", "/models", {**REMOTE, "host": "evil.example"})
    assert "Origin" in refusal(opened, "GET", "/models", {**REMOTE, "origin": "https://evil.example"})


@pytest.mark.parametrize(
    "parameters",
    [
        {"url": "{home}/elsewhere"},
        {"url": "file://{home}/elsewhere"},
        {"url": "{home}/store/../elsewhere"},
        {"url": "{home}/store/link"},
        {"url": "s3://bucket/model"},
        {"url": "owner/model"},
        {"url": "{home}/store/third", "option.model_id": "{home}/elsewhere"},
        {"url": "{home}/store/third", "option.entryPoint": "{home}/elsewhere/model.py"},
        {"url": "{home}/store/third", "option.entryPoint": "../../elsewhere/model.py"},
        {"url": "{home}/store/third", "option.pythonExecutable": "/bin/sh"},
        {"url": "{home}/store/third", "option.env": "LD_PRELOAD=x"},
        {"url": "{home}/store/third", "option.tool_parser_plugin": "{home}/elsewhere/model.py"},
        {"url": "{home}/store/third", "option.worker_cls": "antigravity.Worker"},
        {"url": "{home}/store/third", "option.tokenizer": "owner/model"},
        {"url": "{home}/store/third", "option.allowed_local_media_path": "/"},
        {"url": "{home}/store/third", "option.speculative_config": '{{"model": "owner\\u002fmodel"}}'},
        {"url": "{home}/store/third", "option.speculative_config": "{{'model': 'owner/model'}}"},
    ],
)
def test_others_register_what_is_in_the_store(opened: Server, home: Path, parameters: dict[str, str]) -> None:
    if not (home / "store" / "link").exists():
        (home / "store" / "link").symlink_to(home / "elsewhere")
    given = {name: value.format(home=home) for name, value in parameters.items()}
    assert "registration_sources" in refusal(opened, "POST", "/models", REMOTE, params=given)


def test_the_store_can_be_registered_by_others_and_everything_from_here(opened: Server, home: Path) -> None:
    for name, headers in (("store/third", REMOTE), ("elsewhere", {})):
        given = {"url": str(home / name), "option.dtype": "fp16", "option.draft_model_compiled_path": str(home / name)}
        assert opened.http.post("/models", params=given, headers=headers).status_code == 200
        assert opened.http.delete(f"/models/{Path(name).name}").status_code == 200


@pytest.mark.parametrize("name", ["a b", "a\nb", "-a", "a%b", "<b>", "", "a" * 256, "a/b", "a;b", '"'])
def test_names_are_of_one_pattern(server: Server, home: Path, name: str) -> None:
    parameters = {"url": str(home / "elsewhere"), "model_name": name or "?"}
    reply = server.http.post("/models", params=parameters)
    assert (reply.status_code, "Parameter model_name is" in reply.text) == (400, True)


def test_strangers_read_no_local_paths(server: Server, home: Path) -> None:
    wait_until(lambda: server.http.get("/ping").json()["broken"]["status"] == "FAILED", "the model has failed")
    for headers, shown in ((REMOTE, False), ({}, True)):
        answers = [
            server.http.get("/v1/models", headers=headers),
            server.http.get("/info?model_name=first", headers=headers),
            server.http.post("/predictions/broken", json=request("a"), headers=headers),
        ]
        assert [str(home) in answer.text for answer in answers] == [shown, shown, shown]
        index = server.http.post("/v2/repository/index", headers=headers).json()
        reason = next(entry["reason"] for entry in index if entry["name"] == "broken")
        assert (str(home) in reason, 'option.dtype = "***" is not allowed' in reason) == (shown, True)
        raised = server.http.post("/predictions/raising", content=b"x", headers=headers)
        message = raised.json()["error"]
        assert (raised.status_code, str(home) in message, "not this: größe" in message) == (424, shown, True)
    assert "serving.properties:1: option.dtype" in server.http.post("/predictions/broken", headers=REMOTE).text


def test_strangers_see_no_file_urls_of_adapters(tmp_path: Path) -> None:
    model, adapter = make_model(tmp_path / "model", enable_lora="true"), tmp_path / "outside"
    adapter.mkdir()
    with running(model, workers=1) as server:
        for number, src in enumerate((f"file:{adapter}", f"file://{adapter}", str(adapter))):
            parameters = {"name": f"a{number}", "src": src}
            assert server.http.post("/models/model/adapters", params=parameters).status_code == 200
        near, far = (server.http.get("/v1/models", headers=headers).json()["data"] for headers in ({}, REMOTE))
    assert [entry["root"] for entry in far] == ["model", "a0", "a1", "a2"]
    assert [entry["root"].startswith(("/", "file:")) for entry in near] == [True] * 4


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("owner/model", True),
        ("s3://bucket/model", True),
        ("/srv/model", False),
        ("file:/srv/model", False),
        ("file:srv/model", False),
        ("../srv/model", False),
        ("a/b/c", False),
        ("~/model", False),
    ],
)
def test_a_place_is_shown_to_strangers_if_it_is_on_the_hub_or_on_s3(place: str, shown: bool) -> None:
    scope: dict[str, Any] = {"client": ("10.0.0.1", 1), "server": ("10.0.0.2", 80), "headers": []}
    assert shown_path(place, "name", scope) == (place if shown else "name")
    assert shown_path(place, "name", {**scope, "client": ("127.0.0.1", 1)}) == place


@pytest.mark.parametrize("prompt", ["name-a-path", "token-then-name-a-path"])
@pytest.mark.parametrize("stream", [False, True])
def test_strangers_read_no_paths_in_errors_of_workers_and_nobody_reads_secrets(
    server: Server, home: Path, prompt: str, stream: bool
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/predictions/first", request(prompt, stream=stream)),
        ("/v1/completions", {"model": "first", "prompt": prompt, "stream": stream}),
        ("/v2/models/first/generate" + "_stream" * stream, {"text_input": prompt}),
    ]
    for path, body in asked:
        far, near = (server.http.post(path, json=body, headers=headers).text for headers in (REMOTE, {}))
        assert [str(home) in text for text in (far, near)] == [False, True], far + near
        assert ["größe.bin with ***, s3://***@x" in text for text in (far, near)] == [True, True], far + near
        assert "planted" not in far + near


def test_paths_of_urls_stay(tmp_path: Path) -> None:
    text = f"{tmp_path}/a.py:3: use POST /v1/models/x at http://host/tmp/b, not /no-such-directory/c"
    assert without_directories(text) == "a.py:3: use POST /v1/models/x at http://host/tmp/b, not /no-such-directory/c"
    urls = f"file:{tmp_path}/a and file://{tmp_path}/b and xfile:{tmp_path}/c"
    assert without_directories(urls) == f"file:a and file://b and xfile:{tmp_path}/c"
    error = shown_error(HandlerError(f"{tmp_path}/a", 418), {"client": ("10.0.0.1", 1), "headers": []})
    assert isinstance(error, HandlerError)
    assert (error.message, error.code) == ("a", 418)


@pytest.mark.parametrize(
    ("client", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", False),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:127.0.0.2", False),
        ("::ffff:10.0.0.1", False),
        (None, False),
        ("10.0.0.1", False),
        ("2001:db8::1", False),
    ],
)
def test_local_clients(client: str | None, local: bool) -> None:
    scope = {"client": None if client is None else (client, 1), "server": ("127.0.0.1", 8080), "headers": []}
    assert is_local(scope) is local
    sign = "its connection is gone" if client is None else f"this client is at {client}"
    assert local or remote_sign(scope) == sign


@pytest.mark.parametrize(
    "header",
    [
        *("forwarded", "x-forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-port"),
        *("via", "x-real-ip", "true-client-ip", "x-client-ip", "cf-connecting-ip", "cf-ray", "cdn-loop"),
        *("x-envoy-external-address", "x-envoy-attempt-count", "x-original-uri", "x-original-forwarded-for"),
        *("fastly-client-ip", "fly-client-ip", "l5d-client-id", "x-cluster-client-ip", "x-azure-clientip"),
    ],
)
@pytest.mark.parametrize("client", [("127.0.0.1", 1), None])
def test_a_client_behind_a_proxy_that_says_so_is_not_local(client: tuple[str, int] | None, header: str) -> None:
    server = ("127.0.0.1", 8080) if client else ("/run/lmi.sock", None)
    assert not is_local({"client": client, "server": server, "headers": [(header.encode(), b"1")]})
    own = [(b"x-amzn-trace-id", b"Root=1"), (b"host", b"h"), (b"x-request-id", b"1"), (b"x-api-key", b"k")]
    assert is_local({"client": client, "server": server, "headers": own})


def test_a_client_of_a_unix_socket_is_local_and_one_that_is_gone_is_not() -> None:
    assert is_local({"client": None, "server": ("/run/lmi.sock", None), "headers": []})
    assert not is_local({"client": None, "server": None, "headers": []})


@pytest.mark.parametrize(
    ("variables", "managed", "said"),
    [
        ({"SERVING_API_KEYS": "key-0123456789"}, False, "by no client, because api_keys is set"),
        ({"SERVING_API_KEYS": "key-0123456789", "SERVING_MANAGEMENT_CLIENTS": "local"}, True, "by clients on this"),
        ({"SERVING_API_KEYS": "key-0123456789", "SERVING_MANAGEMENT_CLIENTS": "any"}, True, "by all clients"),
        ({"SERVING_API_KEYS": "key-0123456789", "SAGEMAKER_MULTI_MODEL": "true"}, True, "by all clients"),
    ],
)
def test_with_keys_for_requests_a_proxy_without_headers_opens_nothing(
    tmp_path: Path, variables: dict[str, str], managed: bool, said: str
) -> None:
    """What nginx sends by default looks like a client on this machine: an address of it, and no further header."""
    with running(make_model(tmp_path / "model"), variables=variables) as server:
        server.log_line(f"models are managed {said}")
        server.log_line(r"\] ready: process")
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        answers = [
            server.http.get("/models"),
            server.http.put("/models/model?min_worker=1"),
            server.http.get("/console/models/model"),
            server.http.post("/console/chat/completions", json=chat),
        ]
        assert [answer.status_code for answer in answers] == [200 if managed else 403] * 4
        assert managed or all("management_api_keys" in answer.text for answer in answers)
        assert server.http.post("/predictions/model", json=request("a")).status_code == 401
        assert server.http.get("/ping").status_code == 200


@pytest.mark.parametrize(
    ("variables", "warned"),
    [
        ({"SERVING_MANAGEMENT_HOST": "0.0.0.0"}, True),
        ({"SERVING_MANAGEMENT_HOST": "0.0.0.0", "SERVING_MANAGEMENT_CLIENTS": "local"}, False),
        ({"SERVING_MANAGEMENT_HOST": "0.0.0.0", "SERVING_MANAGEMENT_API_KEYS": "key-0123456789"}, False),
        ({"SERVING_MANAGEMENT_HOST": "127.0.0.1"}, False),
        ({}, False),
    ],
)
def test_a_server_that_others_reach_without_keys_warns_of_proxies(
    tmp_path: Path, variables: dict[str, str], warned: bool
) -> None:
    with running(make_model(tmp_path / "model"), variables={"SERVING_MANAGEMENT_PORT": "0", **variables}) as server:
        server.log_line(r"\] ready: process")
    assert any("behind a proxy that adds no header" in line for line in server.lines) is warned


def test_texts_of_clients_forge_no_lines_of_the_log(server: Server) -> None:
    forged = "x\n2026-01-01 00:00:00,000 ERROR root: all is lost\r\x1b[2J"
    server.http.post("/models", params={"url": f"/nowhere/{forged}", "model_name": "forged", "synchronous": "false"})
    server.log_line("model forged could not be loaded")
    server.log_line(r"^  2026-01-01 00:00:00,000 ERROR root: all is lost\\x0d\\x1b\[2J")
    assert not any(line.startswith("2026-01-01") or "\x1b" in line for line in server.lines)
    server.http.delete("/models/forged")


def test_ordinary_lines_are_logged_as_they_are() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "größer 漢字\ttab", None, None)
    assert LineFormatter("%(message)s").format(record) == "größer 漢字\ttab"
