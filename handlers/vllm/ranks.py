"""vLLM's engine core on the ranks of an MPI group: what the one of rank 0 was told, the others are told too.

Every rank has a scheduler of its own and its part of the model. They stay at the same place because each of them gets
the same calls in the same order; activations and logits go between them by vLLM's own means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from handlers.rolling_batch.communicator import Communicator
from handlers.vllm import library
from lmi_server.machine.environment import own_rank


class _Call(msgspec.Struct, array_like=True, frozen=True):
    """A method of the engine core, and its argument as vLLM's encoder writes it; no buffers without one."""

    method: str
    argument: list[bytes] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Call).decode
_STEP, _END = "get_output", "shutdown"
_ARGUMENTS: dict[str, Any] = {
    "add_request": library.EngineCoreRequest,
    "abort_requests": list[str],
    "add_lora": library.LoRARequest,
    "remove_lora": int,
    "pin_lora": int,
}


class LeadingCore:
    """Rank 0's engine core, as vLLM's `LLMEngine` calls it. Not thread-safe: it is called from the step loop.

    What rank 0 itself refuses is told to nobody. What another rank fails in alone ends the group.
    """

    def __init__(self, core: Any, communicator: Communicator) -> None:
        self._core = core
        self._communicator = communicator
        self._encoder = library.MsgpackEncoder()

    def get_supported_tasks(self) -> Any:
        return self._core.get_supported_tasks()

    def get_output(self) -> Any:
        """Step; every rank does so at the same time."""
        self._tell(_Call(_STEP))
        return self._core.get_output()

    def add_request(self, request: Any) -> None:
        self._do("add_request", request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._do("abort_requests", request_ids)

    def add_lora(self, adapter: Any) -> bool:
        return bool(self._do("add_lora", adapter))

    def remove_lora(self, number: int) -> bool:
        return bool(self._do("remove_lora", number))

    def pin_lora(self, number: int) -> bool:
        return bool(self._do("pin_lora", number))

    def shutdown(self) -> None:
        self._tell(_Call(_END))
        self._core.shutdown()

    def _do(self, method: str, argument: Any) -> Any:
        # Written down first: the core may change what it is given.
        call = _Call(method, [bytes(buffer) for buffer in self._encoder.encode(argument)])
        result = getattr(self._core, method)(argument)
        self._tell(call)
        return result

    def _tell(self, call: _Call) -> None:
        self._communicator.broadcast(_encode(call))


def lead(engine: library.LLMEngine) -> None:
    """Let the other ranks of this process' group follow `engine`, whose core has been loaded on all of them."""
    engine.engine_core = LeadingCore(engine.engine_core, Communicator(own_rank()))


def follow(core: Any) -> None:
    """Do with this rank's engine core what rank 0's does, until that one is shut down."""
    communicator = Communicator(own_rank())
    decoders: dict[str, Callable[[list[bytes]], Any]] = {
        method: library.MsgpackDecoder(kind).decode for method, kind in _ARGUMENTS.items()
    }
    while (call := _decode(communicator.receive())).method != _END:
        if call.method == _STEP:
            core.get_output()
        else:
            getattr(core, call.method)(decoders[call.method](call.argument))
    core.shutdown()
