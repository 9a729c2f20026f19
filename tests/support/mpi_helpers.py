"""Groups of MPI ranks: their processes, the files that they leave behind, their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from process_log import LIMIT_S
from processes import children
from server_helpers import Server, running

from lmi_server.processes.tree import session_members

SHARED_MEMORY = Path("/dev/shm")


def litter(server: int) -> list[str]:
    """Return the directories that groups of a server have left in shared memory."""
    return [path.name for path in SHARED_MEMORY.glob(f"lmi-{server}-*")]


@contextlib.contextmanager
def clean(*directories: Path, libraries: str = "worker") -> Iterator[Server]:
    """Serve models, and check at the end that nothing of their groups is left. `libraries` are those of Server."""
    with running(*directories, libraries=libraries) as server:
        yield server
        if server.process.returncode is None:
            assert server.stop() == 0
    assert not litter(server.process.pid)


def group_members(server: int) -> list[int]:
    """Return the processes of all groups of a server."""
    return [pid for launcher in children(server) for pid in session_members(launcher)]


def process_of_rank(server: int, rank: int) -> int:
    """Return the process id of a rank."""
    return ranks_of(server, rank)[0]


def ranks_of(server: int, rank: int) -> list[int]:
    """Return the processes that have this rank in their environment, none before mpirun has started it.

    If the ranks are forks, these are the processes that stand for them, and the forks come first.
    """
    mark = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    members = [Path("/proc", str(pid)) for pid in group_members(server)]
    forks = [member for member in members if (member / "comm").read_text() == f"rank {rank}\n"]
    marked = [member for member in members if mark in (member / "environ").read_bytes().split(b"\0")]
    return [int(member.name) for member in (*forks, *marked)]


def generated(model: Any, prompt: str, count: int, **parameters: Any) -> list[int]:
    """Return the tokens with which transformers' own `generate` continues a prompt."""
    import torch
    from tiny_models import byte_tokenizer

    inputs = byte_tokenizer()(prompt, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(inputs["input_ids"], max_new_tokens=count, do_sample=False, pad_token_id=0, **parameters)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def generated_like(model: Any, prompt: str, tokens: list[int], count: int) -> list[int]:
    """Return what `generated` does, which is quick if it is `tokens`."""
    from rolling_batch_helpers import is_generated
    from tiny_models import byte_tokenizer

    if is_generated(model, byte_tokenizer().encode(prompt), tokens, count, model.generation_config.eos_token_id):
        return tokens
    return generated(model, prompt, count)


def body(prompt: str, count: int, stream: bool = False) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": count, "details": True}, "stream": stream}


def answered(answer: httpx.Response) -> list[int]:
    """Return the tokens of an answer."""
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def assert_tokens_of_the_model_itself(server: Server, model: Any) -> None:
    """Generate from many prompts at once, while clients of other requests leave, and compare with `generate`."""
    chance = random.Random(3)
    prompts = ["".join(chance.choices("abcdefgh ", k=length)) for length in (1, 3, 9, 20, 60, 130, 5, 44, 2, 90)]
    counts = [chance.choice([1, 7, 24, 60]) for _ in prompts]

    async def ask() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=LIMIT_S) as client:
            leaving = [asyncio.create_task(leave_after_a_token(client, f"leaves {index}")) for index in range(6)]
            asked = zip(prompts, counts, strict=True)
            sent = (client.post("/invocations", json=body(prompt, count)) for prompt, count in asked)
            found = [answered(answer) for answer in await asyncio.gather(*sent)]
            await asyncio.gather(*leaving)
            return found

    for asked in zip(prompts, asyncio.run(ask()), counts, strict=True):
        assert asked[1] == generated_like(model, *asked)


async def leave_after_a_token(client: httpx.AsyncClient, prompt: str) -> None:
    async with client.stream("POST", "/invocations", json=body(prompt, 150, stream=True)) as answer:
        async for _ in answer.aiter_lines():
            return
