"""The kernels for the updates of adapters compute what plain operations do, and so does the bank that has them.

They run on a GPU by NVIDIA, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from handlers.rolling_batch.lora.kernels import add_updates_on_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "width", "outputs"), [(16, 64, 200), (48, 600, 130), (20, 33, 17)])
def test_each_row_gets_the_update_of_its_adapter(dtype: torch.dtype, ranks: int, width: int, outputs: int) -> None:
    torch.manual_seed(ranks)
    down, up = torch.randn(3, ranks, width), torch.randn(3, ranks, outputs)
    down[1] = torch.nan  # nobody's
    given, output = torch.randn(5, width), torch.randn(5, outputs)
    places = torch.tensor([2, -1, 0, 2, -1], dtype=torch.int32)
    down, up, given, output = (part.to(DEVICE, dtype) for part in (down, up, given, output))
    expected = output.double()
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            expected[row] += given[row].double() @ down[place].double().T @ up[place].double()
    found = output.clone()
    add_updates_on_gpu(given, found, down, up, places.to(DEVICE))
    assert torch.equal(found[1], output[1])
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
