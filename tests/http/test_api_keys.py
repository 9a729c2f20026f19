"""API keys for requests and for management, and secrets that nothing shows."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_servers import run_command
from own_code_helpers import make_own
from product_helpers import Server as Product
from server_helpers import Server, make_model, request, running
from waiting import wait_until

from frontend.access.api_keys import key_ring
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import Secrets, is_secret

USER, OTHER, ADMIN = "user-key-0123456789", "other-key-0123456789", "admin-key-0123456789"
REMOTE = {"x-forwarded-for": "203.0.113.7"}
HEADERS = """
import os
from djl_python import Output
def handle(inputs):
    seen = [*inputs.get_properties(), *os.environ.values()]
    return None if inputs.is_empty() else Output().add_as_json(seen)
"""
PARENT = """
import os
from djl_python import Output
def handle(inputs):
    if not inputs.is_empty():
        with open(f"/proc/{os.getppid()}/environ", encoding="utf-8") as file:
            return Output().add(file.read().replace("\\0", " "))
"""
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "model"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


LINE = f"sha256:{hashlib.sha256(OTHER.encode()).hexdigest()} max_concurrent_requests=1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    (directory / "keys").write_text(f"# for the other team\n{LINE}\n")
    (directory / "management_keys").write_text("unused-key-0123456789\n")
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    """Serve with keys of both kinds: one as it is, one as a digest in a file, with a limit."""
    variables = {
        "SERVING_API_KEYS": USER,
        "SERVING_API_KEYS_FILE": str(directory / "keys"),
        "SERVING_MANAGEMENT_API_KEYS": ADMIN,
        "SERVING_MANAGEMENT_API_KEYS_FILE": str(directory / "management_keys"),
        "HF_TOKEN": "hf_planted_in_the_environment",
    }
    model = make_model(directory / "model", echo_delay_ms=20, hf_token="hf_planted_in_the_file")
    with running(model, make_own(directory / "headers", HEADERS), variables=variables, workers=2) as server:
        yield server


@pytest.mark.parametrize(
    "headers",
    [
        bearer(USER),
        {"x-api-key": USER},
        {"authorization": f"bearer  {USER}"},
        bearer(OTHER),
        bearer(USER) | {"origin": "https://page.example", "host": "models.example"},
    ],
)
def test_a_request_with_a_key_is_served(server: Server, headers: dict[str, str]) -> None:
    for path in ("/predictions/model", "/invocations?model_name=model", "/models/model/invoke"):
        assert server.http.post(path, json=request("a"), headers=headers).status_code == 200
    for path in ("/v1/models", "/v1/models/model", "/version", "/info?model_name=model"):
        assert server.http.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(ADMIN), {"authorization": USER}, {"x-api-key": ""}, {"authorization": "Basic YTpi"}],
)
def test_a_request_without_a_key_is_refused_in_the_form_of_its_api(server: Server, headers: dict[str, str]) -> None:
    lmi = server.http.post("/predictions/model", json=request("a"), headers=headers)
    assert (lmi.status_code, lmi.json()["type"], lmi.headers["www-authenticate"]) == (
        401,
        "UnauthorizedException",
        "Bearer",
    )
    openai = server.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert (openai.status_code, openai.json()["error"]["code"]) == (401, "invalid_api_key")
    assert all(len(answer.headers.get_list("x-request-id")) == 1 for answer in (lmi, openai))
    anthropic = server.http.post("/v1/messages", json=CHAT, headers=headers)
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (401, "authentication_error")
    assert anthropic.headers["request-id"] == anthropic.json()["request_id"] == anthropic.headers["x-request-id"]
    for path in ("/v1/models", "/version", "/info", "/v2", "/v2/models/model", "/v2/models/model/ready"):
        assert server.http.get(path, headers=headers).status_code == 401
    long = server.http.post("/predictions/model", content=b"x" * 200_000, headers=headers)
    assert long.status_code == 401


def test_health_needs_no_key(server: Server) -> None:
    for path in ("/ping", "/health", "/health/live", "/health/ready"):
        assert server.http.get(path).status_code == 200


def test_openais_client_raises_its_own_error(server: Server) -> None:
    import openai

    base = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert raised.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=base, api_key=USER) as client:
        assert client.models.list().data[0].id == "headers"


def test_management_needs_a_key_of_its_own_and_then_nothing_else(server: Server) -> None:
    for headers in ({}, bearer(USER), {**REMOTE, **bearer(OTHER)}):
        for path in ("/models", "/models/model", "/metrics", "/server/metrics", "/server/logging"):
            assert server.http.get(path, headers=headers).status_code == 401
        assert server.http.delete("/models/model", headers=headers).status_code == 401
    for headers in ({}, REMOTE, {"host": "lmi.example.com"}):
        for path in ("/models", "/models/model", "/metrics"):
            assert server.http.get(path, headers={**headers, **bearer(ADMIN)}).status_code == 200


def test_the_models_code_gets_no_key(server: Server) -> None:
    for headers in (bearer(USER), {"x-api-key": USER}):
        names = server.http.post("/predictions/headers", content=b"x", headers={**headers, "x-own": "1"}).json()
        assert "x-own" in names
        assert {"authorization", "x-api-key"}.isdisjoint(map(str.lower, names))
        assert {USER, ADMIN}.isdisjoint(names), "not even by the variables of the server"


@pytest.mark.slow
def test_the_models_code_finds_no_key_in_the_servers_process(tmp_path: Path) -> None:
    """The server is started as users start it, and a worker looks at the variables of its parent."""
    command = tmp_path / "lmi-server"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lmi_server "$@"\n')
    command.chmod(0o755)
    model = make_own(tmp_path / "model", PARENT)
    variables = {**os.environ, "SERVING_API_KEYS": USER, "SERVING_MANAGEMENT_API_KEYS": ADMIN, "A": "told"}
    server = Product(model, commands=tmp_path, variables=variables)
    try:
        told = server.http.post("/invocations", content=b"x", headers=bearer(USER)).text
        assert server.http.post("/invocations", content=b"x").status_code == 401
        assert server.http.get("/models", headers=bearer(ADMIN)).status_code == 200
    finally:
        server.stop()
    assert "A=told" in told
    assert USER not in told
    assert ADMIN not in told


def test_a_key_has_no_more_requests_at_a_time_than_its_limit(server: Server) -> None:
    def post() -> int:
        return server.http.post("/predictions/model", json=request("a"), headers=bearer(OTHER)).status_code

    long = request("a", 1_000_000, stream=True)
    with server.http.stream("POST", "/predictions/model", json=long, headers=bearer(OTHER)) as first:
        tokens = first.iter_lines()  # the connection closes with it
        assert next(tokens), "the first request runs"
        assert post() == 429
        refused = server.http.post("/v1/chat/completions", json=CHAT, headers=bearer(OTHER))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        counts = server.http.get("/metrics", headers=bearer(ADMIN)).text
        assert 'lmi_requests_refused_total{model="",reason="key_limit"}' in counts
        assert server.http.post("/predictions/model", json=request("a"), headers=bearer(USER)).status_code == 200
    wait_until(lambda: post() == 200, "the place is free again")


def test_files_of_keys_are_read_again(server: Server, directory: Path) -> None:
    new = bearer("new-key-0123456789")
    files = (directory / "keys", directory / "management_keys")

    def statuses() -> set[int]:
        paths = ("/v1/models", "/models")
        return {server.http.get(path, headers=new).status_code for path in paths}

    def busy() -> bool:
        reply = server.http.post("/predictions/model", json=request("a"), headers=bearer(OTHER))
        return reply.status_code == 429

    long = request("a", 1_000_000, stream=True)
    with server.http.stream("POST", "/predictions/model", json=long, headers=bearer(OTHER)) as running:
        tokens = running.iter_lines()
        assert next(tokens)
        assert statuses() == {401}
        for file in files:
            file.write_text(f"{LINE}\nnew-key-0123456789\n")
        wait_until(lambda: statuses() == {200}, "the new key is valid")
        assert busy(), "a key that stays keeps the count of its requests"
        for file in files:
            file.write_text(f"{LINE}\nnew-key-0123456789 limit\n")
        for setting in ("api_keys", "management_api_keys"):
            server.log_line(f" {setting}_file: entry 2 is not allowed; .*; the keys from before are valid")
        assert statuses() == {200}
        assert busy()
    for file in files:
        file.write_text(f"{LINE}\n")
    wait_until(lambda: statuses() == {401}, "the key is gone")
    server.log_line("api_keys_file was loaded again: 2 keys are valid")


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("", None),
        ("a max_concurrent_requests=x", None),
        ("a max_concurrent_requests=0", None),
        ("a b", None),
        ("sha256:", None),
        ("sha256:0123", None),
        (f"sha256:{'0' * 63}g", None),
        (f"SHA256:{'0' * 64}", None),
        (None, "/no"),
    ],
)
def test_settings_that_name_no_key_stop_the_server(given: str | None, file: str | None) -> None:
    with pytest.raises(ConfigurationError, match="api_keys"):
        key_ring("api_keys", given, file)


def test_no_log_and_no_answer_shows_a_secret(server: Server) -> None:
    planted = [USER, OTHER, ADMIN, "hf_planted_in_the_environment", "hf_planted_in_the_file"]
    secret_url = "s3://AKIAKEY:planted-in-the-url@bucket/model?X-Amz-Signature=planted-signature"
    admin = bearer(ADMIN)
    answers = [
        server.http.post(
            "/models", params={"url": secret_url, "synchronous": "false", "model_name": "s3"}, headers=admin
        ),
        server.http.post("/models", params={"url": f"/nowhere/{USER}"}, headers=admin),
    ]
    wait_until(lambda: server.http.get("/ping").json()["s3"]["status"] == "FAILED", "the model has failed")
    for path in ("/models", "/models/s3", "/models/model", "/metrics", "/predictions/s3", "/v1/models"):
        answers.append(server.http.get(path, headers=bearer(USER) if path.startswith(("/v1", "/pred")) else admin))
    server.http.delete("/models/s3", headers=admin)
    server.log_line("model s3 is unregistered")
    shown = "".join([*server.lines, *(answer.text for answer in answers)])
    assert "***" in shown
    found = [text for text in (*planted, "planted-in-the-url", "planted-signature") if text in shown]
    assert found == []


@pytest.mark.slow
def test_explain_and_check_show_no_secret(tmp_path: Path) -> None:
    keys = {
        "hf_token": "hf_planted_in_the_file",
        "env": "MY_PASSWORD=planted-in-env,B=2",
        "dtype": "hf_planted_in_the_file",
    }
    model = make_model(tmp_path / "model", **keys)
    variables = {**os.environ, "OPTION_API_KEY": "planted-variable", "HF_TOKEN": "hf_planted_in_the_environment"}
    shown = ""
    for arguments in (["explain"], ["explain", "--json"], ["explain", "--all"], ["check"]):
        ended = run_command(*arguments, str(model), env=variables, cwd=tmp_path)
        shown += ended.stdout + ended.stderr
    assert "***" in shown
    assert [line for line in shown.splitlines() if "planted" in line] == []


def test_which_names_are_secret() -> None:
    for name in (
        "option.hf_token",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "DEVELOPER_TOKEN",
        "api_keys",
        "keystore_pass",
    ):
        assert is_secret(name), name
    for name in (
        "option.max_num_tokens",
        "max_new_tokens",
        "option.tokens_per_block",
        "option.smoothquant_per_token",
        "bypass",
        "monkey",
    ):
        assert not is_secret(name), name
    secrets = Secrets()
    secrets.add_named({"HF_TOKEN": "ab", "option.password": "long-enough"})
    assert secrets.mask("ab long-enough") == "ab ***", "a value of two letters would hide ordinary text"


def test_probes_and_the_document_need_no_key(server: Server) -> None:
    for path in ("/ping", "/health", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs"):
        assert server.http.get(path).status_code == 200, path
