"""vLLM's engine core on the ranks of an MPI group: the other ranks repeat every call that rank 0's core gets.

Under the MPI engine `mpirun` has started the processes instead of vLLM ("external launcher" in vLLM). In that mode each
rank has a whole engine core, scheduler included, beside its part of the model, and all of them have to get the same
requests in the same order. Only rank 0 has requests. So `LeadingCore` sends each call that changes the core's state (a
new request, an abort, a step, an adapter) to the other ranks, and `follow` repeats it. All ranks have the same logits
and seeds, and so the same schedule and tokens: nothing else is synchronised. Activations and logits travel by vLLM's
own collectives inside each step.

A call that fails on rank 0 is not broadcast, so a refused request leaves the ranks in step. A call that fails only on
another rank ends that rank's process and so the group, because the ranks' states differ from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from handlers.ranks.communicator import Communicator
from handlers.vllm import library
from lmi_server.machine.environment import meeting_point, own_rank

_SHARED_MEMORY = Path("/dev/shm")  # only listed here  # nosec B108


class _CoreCall(msgspec.Struct, array_like=True, frozen=True):
    """A method of the engine core, and its argument as the buffers that vLLM's encoder writes.

    `argument` is empty for a method without one. vLLM's encoder is used because the argument may hold its own types,
    such as tensors of images.
    """

    method: str
    argument: list[bytes] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_CoreCall).decode
_STEP, _SHUTDOWN = "get_output", "shutdown"
_ARGUMENT_TYPES: dict[str, Any] = {
    "add_request": library.EngineCoreRequest,
    "abort_requests": list[str],
    "add_lora": library.LoRARequest,
    "remove_lora": int,
    "pin_lora": int,
}


class RankExecutor(ExecutorWithExternalLauncher):
    """Computes the part of the model that one rank of an MPI group has."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return the address at which the ranks meet, this rank, and its rank on this machine.

        vLLM would take env://. On the CPU it derives the names of its shared memory from this address, so with env://
        all groups of a machine would use the same names and overwrite each other's memory.
        """
        rank = own_rank().rank
        return meeting_point(), rank, rank


class LeadingCore:
    """Rank 0's engine core, with the methods that vLLM's `LLMEngine` calls. Not thread-safe: the step loop calls it."""

    def __init__(self, core: Any, communicator: Communicator) -> None:
        self._core = core
        self._communicator = communicator
        self._encoder = library.MsgpackEncoder()

    def get_supported_tasks(self) -> Any:
        return self._core.get_supported_tasks()

    def get_output(self) -> Any:
        """Compute a step and return its outputs.

        The broadcast comes first: the step waits for the other ranks inside its collectives.
        """
        self._broadcast(_CoreCall(_STEP))
        return self._core.get_output()

    def add_request(self, request: Any) -> None:
        self._call("add_request", request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._call("abort_requests", request_ids)

    def add_lora(self, adapter: Any) -> bool:
        return bool(self._call("add_lora", adapter))

    def remove_lora(self, number: int) -> bool:
        return bool(self._call("remove_lora", number))

    def pin_lora(self, number: int) -> bool:
        return bool(self._call("pin_lora", number))

    def shutdown(self) -> None:
        self._broadcast(_CoreCall(_SHUTDOWN))
        self._core.shutdown()

    def _call(self, method: str, argument: Any) -> Any:
        """Call rank 0's core, then broadcast; if the core raises, the other ranks never hear of the call."""
        # Encoded before the call: the core may change its argument, and the other ranks need the original.
        call = _CoreCall(method, [bytes(buffer) for buffer in self._encoder.encode(argument)])
        result = getattr(self._core, method)(argument)
        self._broadcast(call)
        return result

    def _broadcast(self, call: _CoreCall) -> None:
        self._communicator.broadcast(_encode(call))


def leading_engine(config: Any, loggers: list[Callable[..., Any]]) -> library.LLMEngine:
    """Return the engine of rank 0. The other ranks load at the same time and must then run `follow`."""
    engine = library.LLMEngine(config, RankExecutor, log_stats=True, stat_loggers=loggers)
    _unlink_shared_memory()
    engine.engine_core = LeadingCore(engine.engine_core, Communicator(own_rank()))
    return library.with_own_tokenizer(engine)


def following_core(config: Any) -> InprocClient:
    """Return the engine core of a rank other than 0."""
    core = InprocClient(config, RankExecutor, log_stats=False)
    _unlink_shared_memory()
    return core


def follow(core: Any, communicator: Communicator) -> None:
    """Repeat the calls of rank 0's engine core on this rank's `core`, until rank 0 shuts down."""
    decoders: dict[str, Callable[[list[bytes]], Any]] = {
        method: library.MsgpackDecoder(argument_type).decode for method, argument_type in _ARGUMENT_TYPES.items()
    }
    while (call := _decode(communicator.receive())).method != _SHUTDOWN:
        if call.method == _STEP:
            core.get_output()
        else:
            getattr(core, call.method)(decoders[call.method](call.argument))
    core.shutdown()


def _unlink_shared_memory() -> None:
    """Remove the names of the shared memory that this group's ranks have mapped by now.

    A mapping outlives its name, and memory without a name is freed when the last process that maps it ends, however it
    ends. vLLM itself removes one of the names when it shuts down in order, and never the other: a killed group would
    leave both in /dev/shm.
    """
    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False
    port = meeting_point().rpartition(":")[2]
    for path in _SHARED_MEMORY.glob(f"{port}-*-cpushm_*"):
        path.unlink(missing_ok=True)
