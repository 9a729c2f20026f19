"""The engine cores of an MPI group get the same calls in the same order, without an engine or a group."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports vLLM


class Messages:
    """A communicator of one process: what rank 0 broadcasts is received in the same order."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()

    def broadcast(self, message: bytes) -> None:
        self._messages.append(message)

    def receive(self) -> bytes:
        return self._messages.popleft()


class RecordingCore:
    """An engine core that records its calls, refuses some requests, and changes the others as vLLM's core may."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_request(self, request: Any) -> None:
        if request.request_id == "refused":
            raise ValueError("no such schema")
        self.calls.append(("add_request", request.request_id, list(request.prompt_token_ids)))
        request.prompt_token_ids.clear()

    def abort_requests(self, request_ids: list[str]) -> None:
        self.calls.append(("abort_requests", request_ids))

    def get_output(self) -> dict[int, str]:
        self.calls.append("get_output")
        return {0: "outputs"}

    def add_lora(self, adapter: Any) -> bool:
        self.calls.append(("add_lora", adapter.lora_name, adapter.lora_int_id, adapter.lora_path))
        return True

    def remove_lora(self, number: int) -> bool:
        self.calls.append(("remove_lora", number))
        return False

    def pin_lora(self, number: int) -> bool:
        self.calls.append(("pin_lora", number))
        return True

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def request(request_id: str) -> Any:
    from handlers.vllm import library

    return library.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=library.SamplingParams(max_tokens=4),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_other_ranks_repeat_the_calls_of_rank_0_but_not_those_that_it_refuses() -> None:
    from handlers.vllm import library
    from handlers.vllm.engine import ranks

    messages: Any = Messages()
    leading, following = RecordingCore(), RecordingCore()
    core = ranks.LeadingCore(leading, messages)
    core.add_request(request("a"))
    with pytest.raises(ValueError, match="no such schema"):
        core.add_request(request("refused"))
    assert core.get_output() == {0: "outputs"}
    assert core.add_lora(library.LoRARequest("one", 1, "/adapters/one")) is True
    assert core.pin_lora(1) is True
    assert core.remove_lora(1) is False
    core.abort_requests([])
    core.abort_requests(["a"])
    core.shutdown()
    ranks.follow(following, messages)
    assert following.calls == leading.calls
    assert leading.calls == [
        ("add_request", "a", [1, 2, 3]),
        "get_output",
        ("add_lora", "one", 1, "/adapters/one"),
        ("pin_lora", 1),
        ("remove_lora", 1),
        ("abort_requests", ["a"]),
        "shutdown",
    ]
