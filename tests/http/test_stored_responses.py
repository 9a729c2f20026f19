"""Responses that are kept, by OpenAI's SDK: continued, read, deleted, made in the background."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, MutableMapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai_clients import KEYS, client_of
from server_helpers import Server, make_model, running
from waiting import wait_until

from frontend.storage.objects import open_store
from frontend.storage.owners import EVERYONE, new_id
from frontend.stored_responses import api as api_module
from frontend.stored_responses.capture import ResponseCapture
from frontend.stored_responses.conversation import ResponseRequest
from frontend.stored_responses.records import PREFIX, ResponseStore, StoredResponse
from frontend.stored_responses.settings import ResponseSettings
from lmi_server.contract.errors import RequestError
from lmi_server.dialects.framing import named_event


def create(client: Any, given: Any, tokens: int = 30, **more: Any) -> Any:
    return client.responses.create(model="lmi", input=given, max_output_tokens=tokens, **more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("responses")
    variables = {
        "SERVING_RESPONSES_STORE": str(directory / "store"),
        "SERVING_API_KEYS": ",".join(KEYS),
        "SERVING_RESPONSES_MAX_BACKGROUND": "2",
    }
    with running(make_model(directory / "model", echo_delay_ms=5), variables=variables, workers=1) as server:
        yield server


def test_a_response_is_continued_with_its_conversation(server: Server) -> None:
    """The model echoes its whole prompt."""
    client = client_of(server)
    first = create(client, "one two", tokens=2)
    assert (first.store, first.previous_response_id, first.output_text) == (True, None, " one two")
    second = create(client, [{"role": "user", "content": "three"}], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.output_text.startswith(" one two one two three")
    third = create(client, "four", previous_response_id=second.id, tokens=90, instructions="system")
    assert third.output_text.split()[:6] == ["system", "one", "two", "one", "two", "three"]
    assert client.responses.retrieve(third.id) == third
    fourth = create(client, "five", previous_response_id=third.id)
    assert fourth.output_text.startswith(" one two"), "instructions are of one request"
    fork = create(client, "other", previous_response_id=first.id)
    assert "three" not in fork.output_text


def test_a_stream_is_kept_before_its_last_event(server: Server) -> None:
    client = client_of(server)
    first = create(client, "one two", tokens=2)
    for event in create(client, "three", previous_response_id=first.id, stream=True):
        if event.type in ("response.created", "response.in_progress"):
            assert event.response.previous_response_id == first.id
            identity = event.response.id
        if event.type == "response.incomplete":
            assert event.response.id == identity
            assert client.responses.retrieve(identity) == event.response
    assert create(client, "four", previous_response_id=identity).output_text.startswith(" one two one two three")


def test_what_is_not_to_be_kept_is_not(server: Server) -> None:
    import openai

    client = client_of(server)
    first = create(client, "one two")
    second = create(client, "three", store=False, previous_response_id=first.id)
    assert (second.store, second.previous_response_id) == (False, first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_deleted_response_is_gone(server: Server) -> None:
    import openai

    client = client_of(server)
    first = create(client, "one two")
    second = create(client, "three", previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: create(client, "x", previous_response_id=first.id),
        lambda: create(client, "x", previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError, match=first.id):
            call()


def test_a_key_sees_nothing_of_another(server: Server) -> None:
    import openai

    first, second = (client_of(server, key) for key in KEYS)
    response = create(first, "secret")
    for call in (
        lambda: second.responses.retrieve(response.id),
        lambda: second.responses.delete(response.id),
        lambda: second.responses.cancel(response.id),
        lambda: second.responses.input_items.list(response.id),
        lambda: create(second, "x", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.AuthenticationError):
        create(client_of(server, "no key"), "x")


def test_input_items(server: Server) -> None:
    client = client_of(server)
    items = [{"role": "user", "content": f"text {number}"} for number in range(5)]
    response = create(client, items)
    listed = list(client.responses.input_items.list(response.id, order="asc", limit=2))
    assert [item.content[0].text for item in listed] == [f"text {number}" for number in range(5)]
    assert client.responses.input_items.list(response.id).data[0].content[0].text == "text 4"


def test_a_response_in_the_background(server: Server) -> None:
    client = client_of(server)
    first = create(client, "one two", tokens=2)
    response = create(client, "three", background=True, previous_response_id=first.id)
    assert (response.status, response.background) == ("in_progress", True)
    found: list[Any] = [response]

    def ask() -> bool:
        found[:] = [client.responses.retrieve(response.id)]
        return found[0].status not in ("queued", "in_progress")

    wait_until(ask, "the response has ended")
    assert (found[0].status, found[0].previous_response_id) == ("incomplete", first.id)
    assert found[0].output_text.startswith(" one two one two three")
    assert create(client, "x", previous_response_id=response.id).output_text.startswith(" one two one two three")


def test_a_response_in_the_background_is_cancelled(server: Server) -> None:
    import openai

    client = client_of(server)
    responses = [create(client, "x", tokens=100_000, background=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="responses_max_background=2"):
        create(client, "x", background=True)
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        create(client, "x", previous_response_id=responses[0].id)
    assert client.responses.cancel(responses[0].id).status == "cancelled"
    client.responses.delete(responses[1].id)
    server.until("lmi_requests_in_flight", 0)
    assert client.responses.retrieve(responses[0].id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(responses[1].id)
    assert client.responses.cancel(responses[0].id).status == "cancelled", "once more does nothing"
    done = create(client, "x")
    with pytest.raises(openai.BadRequestError, match="not in the background"):
        client.responses.cancel(done.id)


def test_requests_that_are_refused(server: Server) -> None:
    import openai

    client = client_of(server)
    wrong: tuple[dict[str, Any], ...] = (
        {"background": True, "store": False},
        {"background": True, "stream": True},
        {"temperature": "hot"},
        {"temperature": "hot", "stream": True},
        {"text": 5},
    )
    for more in wrong:
        with pytest.raises(openai.BadRequestError):
            create(client, "x", **more)
    failed = create(client, "x", temperature="hot", background=True)
    wait_until(lambda: client.responses.retrieve(failed.id).status == "failed", "it has failed")
    assert "temperature" in client.responses.retrieve(failed.id).error.message
    for identity in ("../../x", "resp_", new_id(PREFIX), new_id("file-")):
        with pytest.raises(openai.NotFoundError):
            create(client, "x", previous_response_id=identity)


ODD_IDS = ("../../etc/passwd", "..", "a\0b", PREFIX + "1" * 31, "batch_" + "1" * 31, "x" * 5000)


@pytest.mark.parametrize("name", ODD_IDS)
def test_no_id_leads_out_of_the_store(server: Server, name: str) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    for path in (f"/v1/responses/{quoted}", f"/v1/responses/{quoted}/input_items"):
        assert server.http.get(path, headers=headers).status_code == 404, path


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"input": NaN}', b'{"store": 1}', b"[" * 9000])
def test_bodies_that_are_no_request(server: Server, body: bytes) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    assert server.http.post("/v1/responses", content=body, headers=headers).status_code == 400


@pytest.mark.slow
def test_responses_outlive_their_server_and_what_it_could_not_end_has_failed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", echo_delay_ms=5)
    variables = {"SERVING_RESPONSES_STORE": str(tmp_path / "store")}
    with running(model, variables=variables, workers=1) as server:
        client = client_of(server)
        first = create(client, "one two", tokens=2)
        response = create(client, "x", tokens=100_000, background=True)
        server.process.kill()
        server.ended()
    with running(model, variables=variables, workers=1) as server:
        client = client_of(server)
        assert client.responses.retrieve(first.id) == first
        assert create(client, "three", previous_response_id=first.id).output_text.startswith(" one two one two three")
        failed = client.responses.retrieve(response.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")


def test_without_a_store_nothing_is_kept(tmp_path: Path) -> None:
    import openai

    with running(make_model(tmp_path / "model"), workers=1) as server:
        client = client_of(server)
        response = create(client, "one two")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            create(client, "x", previous_response_id=response.id)


# --- the parts ---


def test_the_oldest_responses_of_an_owner_go(tmp_path: Path) -> None:
    settings = ResponseSettings(responses_max_count=3, responses_lifetime=1000.0)
    store = ResponseStore(open_store(str(tmp_path), "x"), settings)
    ids = [new_id(PREFIX) for _ in range(10)]
    for identity in ids:
        store.save("a", StoredResponse({"id": identity}))
    store.save("b", StoredResponse({"id": ids[0]}))
    assert [identity for identity in sorted(ids) if store.load("a", identity)] == sorted(ids)[-3:]
    assert store.load("b", ids[0]) is not None
    old = f"{PREFIX}{0:011x}{'0' * 20}"
    store.save(EVERYONE, StoredResponse({"id": old}))
    assert store.load(EVERYONE, old) is None
    store.sweep()
    assert not (tmp_path / EVERYONE / "responses" / old).exists()


def test_what_others_keep_beside_the_owners_folders_stays(tmp_path: Path) -> None:
    other = tmp_path / "other" / "responses" / "notes.json"
    other.parent.mkdir(parents=True)
    other.touch()
    ResponseStore(open_store(str(tmp_path), "x"), ResponseSettings()).sweep()
    assert other.exists()


@pytest.mark.parametrize(
    ("query", "numbers", "has_more"),
    [
        ({"limit": "2"}, [999, 998], True),
        ({"limit": "2", "order": "asc", "after": "own"}, [501, 502], True),
        ({"after": "msg_x_1"}, [0], False),
    ],
)
def test_a_page_of_an_input_makes_no_objects_of_other_items(
    query: dict[str, str], numbers: list[int], has_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    listed = api_module._list_item
    monkeypatch.setattr(api_module, "_list_item", lambda *given: (made.append(given[1]), listed(*given))[1])
    items: list[Any] = list(range(1000))
    items[500] = {"id": "own", "role": "user", "content": "x"}
    record = StoredResponse({"id": f"{PREFIX}x"}, msgspec.Raw(json.dumps(items).encode()))
    page = api_module._page(record, query)
    assert (made, page["has_more"]) == (numbers, has_more)
    assert [item["id"] for item in page["data"]] == [f"msg_x_{number}" for number in numbers]


def captured(pieces: list[bytes], content_type: str, kept: list[dict[str, Any]]) -> bytes:
    """Return what a client gets of an answer that arrives in pieces."""
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def keep(response: dict[str, Any]) -> bool:
        kept.append(dict(response))
        return True

    async def run() -> None:
        capture = ResponseCapture(send, {"id": "ours", "store": True}, keep)
        headers = [(b"content-type", content_type.encode()), (b"content-length", b"1")]
        await capture({"type": "http.response.start", "status": 200, "headers": headers})
        for number, piece in enumerate(pieces, start=1):
            await capture({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})

    asyncio.run(run())
    return b"".join(sent)


@pytest.mark.parametrize("seed", range(20))
def test_events_do_not_depend_on_their_pieces(seed: int) -> None:
    response = {"id": "theirs", "store": False, "output": ["\n\n"]}
    events = [
        named_event("response.created", {"response": response}),
        named_event("response.output_text.delta", {"delta": "a\n\nevent: response.completed"}),
        named_event("response.completed", {"response": response}),
    ]
    stream = b"".join(events)
    cuts = sorted(random.Random(seed).choices(range(len(stream) + 1), k=seed))
    pieces = [stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])]
    kept: list[dict[str, Any]] = []
    got = captured(pieces, "text/event-stream", kept)
    ours = {**response, "id": "ours", "store": True}
    expected = [
        named_event("response.created", {"response": ours}),
        events[1],
        named_event("response.completed", {"response": ours}),
    ]
    assert got == b"".join(expected)
    assert kept == [ours]


def test_an_answer_that_is_no_response_stays_as_it_is() -> None:
    kept: list[dict[str, Any]] = []
    assert captured([b"plain ", b"text"], "text/plain", kept) == b"plain text"
    assert captured([b"event: error\ndata: {}\n\nrest"], "text/event-stream", kept) == b"event: error\ndata: {}\n\nrest"
    assert not kept


def test_a_body_for_the_model_has_the_conversation_and_no_numbers_change() -> None:
    request = ResponseRequest(b'{"input": "x", "n": 123456789012345678901234567890, "store": true, "x": 1e-7}')
    body = request.body_after(b'[ {"role": "user", "content": "before"} ]')
    assert b"123456789012345678901234567890" in body
    assert b"1e-7" in body
    assert json.loads(body)["input"][0] == {"role": "user", "content": "before"}
    assert json.loads(body)["input"][1]["content"] == "x"
    assert ResponseRequest(b' {"input": 5} ').body_after(b"[1]") == b'{"input": 5}'
    assert ResponseRequest(b'{"input": []}').body_after(b"[1]") == b'{"input": []}'
    with pytest.raises(RequestError):
        ResponseRequest(b'{"previous_response_id": 5}')
