"""Models that are split over ranks, as far as one GPU shows it: two ranks on it, and NCCL with one.

Skipped on a machine without a GPU by NVIDIA. docs/hardware.md says on which ones it has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_ranks import RANKS, serve_part
from rolling_batch_helpers import generated, prompts
from tiny_models import FAMILIES, random_model, saved_model
from torch import distributed

from handlers.ranks.communicator import Communicator
from handlers.ranks.sharding import join_process_group
from lmi_server.contract.ranks import Rank

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

TOKENS = 40


def test_two_ranks_on_one_gpu_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Each has one of two heads of keys; pages, their copies and retractions travel to the other one."""
    config = FAMILIES["llama"]()
    config.update({"vocab_size": 260})
    model = random_model(config)
    assert model.config.num_key_value_heads == RANKS
    saved_model(model, tmp_path)
    common = list(range(3, 40))
    asked = [*prompts(5, seed=5), common, [*common, 7], [*common, 9]]
    torch.multiprocessing.spawn(serve_part, (str(tmp_path), "cuda", asked, TOKENS), nprocs=RANKS)
    answers, page = torch.load(tmp_path / "answers.pt")
    assert page == 16
    assert answers == [generated(model, prompt, TOKENS) for prompt in asked]


class OneRank(Communicator):
    """A communicator without MPI, whose messages would have no receiver."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[None]:
    join_process_group(Rank(0, 1, str(tmp_path)))
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nccl_adds_and_gathers_in_the_order_of_a_stream(joined: None, dtype: torch.dtype) -> None:
    assert distributed.get_backend() == "nccl"
    communicator, stream = OneRank(), torch.cuda.Stream()
    found: list[Any] = []
    with torch.cuda.stream(stream):
        for number in range(20):
            part = torch.full((512, 2048), float(number), dtype=dtype, device="cuda")
            part = part @ torch.eye(2048, dtype=dtype, device="cuda")  # still being computed when it is sent
            found.append((communicator.all_reduce(part.clone()) + 1, communicator.gather_columns(part) + 2))
            message = torch.full((16,), number, device="cuda")
            distributed.broadcast(message, 0)
            found[-1] += (message,)
    stream.synchronize()
    for number, (added, gathered, sent) in enumerate(found):
        assert bool((added == number + 1).all())
        assert bool((gathered == number + 2).all())
        assert gathered.shape == (512, 2048)
        assert sent.tolist() == [number] * 16
