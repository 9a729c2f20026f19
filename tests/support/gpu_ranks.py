"""Two ranks of a split model in processes of their own on one device, without MPI."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from rolling_batch_helpers import EOS, Received
from tiny_models import CONTEXT, byte_tokenizer
from torch import distributed
from transformers import AutoModelForCausalLM

from handlers.ranks.communicator import Communicator
from handlers.ranks.sharding import loading_arguments, make_local
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from lmi_server.contract.generation import SamplingParameters

RANKS, ROWS, KV_TOKENS = 2, 4, 256


class GlooCommunicator(Communicator):
    """Stands for MPI and NCCL, which takes no two ranks of one GPU: gloo carries all of it, through main memory."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, RANKS

    def broadcast(self, message: bytes) -> None:
        distributed.broadcast_object_list([message], 0)

    def receive(self) -> bytes:
        received: list[Any] = [None]
        distributed.broadcast_object_list(received, 0)
        return received[0]

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        total = partial.cpu()
        distributed.all_reduce(total)
        return total.to(partial.device)

    def gather_columns(self, columns: torch.Tensor) -> torch.Tensor:
        own = columns.cpu().contiguous()
        parts = [torch.empty_like(own) for _ in range(RANKS)]
        distributed.all_gather(parts, own)
        return torch.cat(parts, -1).to(columns.device)


def serve_part(rank: int, directory: str, device: str, prompts: list[list[int]], tokens: int) -> None:
    """Be one of the ranks; rank 0 leaves the tokens of the answers, and the page size, in a file."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_float32_matmul_precision("highest")
    distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    check = LoadCheck(whole, CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **loading_arguments(RANKS))
    communicator = GlooCommunicator(rank)
    assert make_local(model, communicator)
    assert model.device.type == device
    runner = ModelRunner(model, CONTEXT, communicator, check, page=16)
    if rank:
        runner.follow()
    else:
        torch.save((_answers(runner, prompts, tokens), runner.page), Path(directory) / "answers.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def _answers(runner: ModelRunner, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    runner.prepare(2 * ROWS, CONTEXT, kv_tokens=KV_TOKENS)
    limits = SchedulerLimits(ROWS, KV_TOKENS, 16, 16, 2 * ROWS, conservativeness=0.05, page=runner.page)
    engine = RollingBatchEngine(runner, Scheduler(limits), byte_tokenizer(), frozenset({EOS}), CONTEXT)
    asked = [Received() for _ in prompts]
    for prompt, answer in zip(prompts, asked, strict=True):
        engine.add("label", prompt, SamplingParameters(max_new_tokens=tokens), "", 3, answer.take, None)
    while engine.has_work:
        engine.step()
    runner.stop()
    assert engine.stats.retracted_requests
    return [copy.copy(answer.tokens) for answer in asked]
