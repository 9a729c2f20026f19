"""In how many threads a load packs weights and computes logits while other processes of it keep cores busy.

OpenMP's threads spin while they wait for one whose core others have: beside a first compilation on two cores, packing
a small model in two threads took several times as long as in one, and kept the compilation from its cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_busy = 0


def set_busy(cores: int) -> None:
    """Say how many cores other processes keep busy from now on."""
    global _busy
    _busy = cores


@contextlib.contextmanager
def only_free_cores() -> Iterator[None]:
    """Have torch compute in as many threads as there are cores left for them, one at least."""
    import torch

    threads = torch.get_num_threads()
    if not _busy or threads == 1:
        yield
        return
    torch.set_num_threads(max(1, threads - _busy))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
