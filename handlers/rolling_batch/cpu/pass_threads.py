"""Chooses the threads that compute a pass on the CPU: the helpers of the kernels, or OpenMP's.

OpenMP's threads wait for each other in each of the hundreds of parallel regions of a pass, and whatever else runs on
the machine delays them all; the helpers do not (see threads/parallel.py). But torch and oneDNN have no other
threads than OpenMP's. These go on for a while after each operation, waiting for the next one, as helpers do, and two
kinds of threads that wait on the same cores would stand in each other's way. So one kind computes a whole pass, or all
of its layers.
"""

from __future__ import annotations

import torch


def start_helpers() -> bool:
    """Start as many helper threads as torch has threads; return whether there are any."""
    from handlers.cpu_kernels.threads import helpers

    return helpers.start(max(torch.get_num_threads(), helpers.threads()))


def begin_pass(only_kernels: bool) -> None:
    """Let helpers compute the next pass, or its next part, if only the project's kernels do it; else OpenMP's threads.

    Beside helpers torch computes what is left for it, a few small operations, in the calling thread.
    """
    from handlers.cpu_kernels.threads import helpers

    if only_kernels != helpers.are_used():
        helpers.use(only_kernels)
        torch.set_num_threads(1 if only_kernels else helpers.threads())
