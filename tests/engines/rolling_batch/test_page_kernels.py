"""The Triton kernels of pages compile for real GPUs, on a machine without one."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from handlers.checkpoints.grouped.kernels import few_rows_kernel, unpack_kernel  # noqa: E402
from handlers.rolling_batch.fused.grouped_row_kernel import grouped_row_kernel  # noqa: E402
from handlers.rolling_batch.fused.one_row import TILES  # noqa: E402
from handlers.rolling_batch.fused.one_row_kernel import linear_kernel  # noqa: E402
from handlers.rolling_batch.pages import kernels  # noqa: E402
from handlers.rolling_batch.pages.launch import (  # noqa: E402
    MAX_SPLITS,
    PageLayer,
    Tuning,
    chunk_options,
    decode_options,
    padded,
    splits_for,
)

H100 = Tuning(132, 232_448)
A10 = Tuning(80, 101_376)
INTEGERS = ("tables", "slots", "positions", "chunks", "ends")
LLAMA = PageLayer(32, 8, 128, 128, 32)
GEMMA = PageLayer(8, 4, 256, 256, 32, window=4096, softcap=50.0)
GPT_OSS = PageLayer(64, 8, 64, 64, 32, window=128, sinks=True)
ODD = PageLayer(71, 1, 80, 80, 32)

on_gpus = pytest.mark.parametrize(
    ("layer", "dtype", "tuning", "architecture"),
    [
        (LLAMA, "bf16", H100, 90),
        (LLAMA, "fp32", H100, 90),
        (GEMMA, "bf16", H100, 90),
        (GPT_OSS, "bf16", H100, 90),
        (ODD, "fp16", A10, 86),
    ],
)

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def compiled(kernel: Any, constants: dict[str, Any], dtype: str, architecture: int, **options: int) -> Any:
    """Compile a kernel to machine code; pointers and strides are multiples of 16, as those of tensors are."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in INTEGERS:
            return "*i32"
        if name in ("partial", "weights"):
            return "*fp32"
        if name == "scale":
            return "fp32"
        return "i32" if name.endswith("_stride") or name == "splits" else f"*{dtype}"

    names = kernel.arg_names
    signature = {name: type_of(name) for name in names}
    aligned = [place for place, name in enumerate(names) if signature[name].startswith("*") or name.endswith("_stride")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert result.asm["cubin"]
    return result


@pytest.mark.parametrize("splits", [False, True])
@on_gpus
def test_decoding_compiles_within_the_shared_memory(
    layer: PageLayer, dtype: str, tuning: Tuning, architecture: int, splits: bool
) -> None:
    options = decode_options(layer, 4 if dtype == "fp32" else 2, tuning)
    tile = options.pop("TILE")
    constants = {**layer.widths, **layer.scores, "TILE": tile}
    group = layer.heads // layer.kv_heads
    more = {"GROUP": group, "GROUP_PAD": padded(group), "PAGE": layer.page, "SOFTCAP": layer.softcap}
    decode = compiled(
        kernels.decode_kernel,
        {**constants, **more, "DIRECT": not splits, "CHAINED": False},
        dtype,
        architecture,
        **options,
    )
    assert decode.metadata.shared <= tuning.shared // 2  # two programs fit
    if splits:
        constants = {"TILE": tile, "VALUE_DIM": layer.value_dim, "VALUE_PAD": padded(layer.value_dim), **layer.scores}
        whole = {**constants, "CHAINED": False, "HEADS": layer.heads, "SPLITS_PAD": MAX_SPLITS}
        assert compiled(kernels.reduce_kernel, whole, dtype, architecture).metadata.shared <= tuning.shared


@pytest.mark.parametrize(("rows", "blocks"), [(5, False), (2048, False), (2048, True)])
@on_gpus
def test_chunks_compile_within_the_shared_memory(
    layer: PageLayer, dtype: str, tuning: Tuning, architecture: int, rows: int, blocks: bool
) -> None:
    options = chunk_options(layer, 4 if dtype == "fp32" else 2, tuning, rows)
    tiles = {name: options.pop(name) for name in ("ROWS", "TILE")}
    constants = {**layer.widths, **layer.scores, **tiles}
    more = {"HEADS": layer.heads, "PAGE": layer.page, "SOFTCAP": layer.softcap, "BLOCKS": blocks}
    chunk = compiled(kernels.chunk_kernel, {**constants, **more}, dtype, architecture, **options)
    assert chunk.metadata.shared <= tuning.shared


@pytest.mark.parametrize("layer", [LLAMA, ODD])
def test_writing_compiles(layer: PageLayer) -> None:
    constants = {**layer.widths, "HEADS_PAD": 1 << (layer.kv_heads - 1).bit_length(), "PAGE": layer.page}
    assert compiled(kernels.write_kernel, constants, "bf16", 90).metadata.shared <= H100.shared


def test_few_rows_are_split_and_many_are_not() -> None:
    assert splits_for(1, 8, H100) == MAX_SPLITS
    assert splits_for(16, 8, H100) == 8
    assert splits_for(256, 8, H100) == 1
    for rows in range(1, 300):
        splits = splits_for(rows, 8, H100)
        assert splits == 1 or splits * rows * 8 <= H100.processors * H100.programs
        assert splits & (splits - 1) == 0


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("architecture", "chained"), [(86, False), (90, True)])
def test_the_kernel_for_one_row_compiles(architecture: int, chained: bool, gated: bool) -> None:
    names = linear_kernel.arg_names
    constants = {
        "OUTPUTS": TILES.outputs, "STEP": TILES.step, "SCALED": True, "ROUNDED": False, "BIASED": False,
        "GATED": gated, "ADDED": not gated, "CHAINED": chained,
    }  # fmt: skip
    numbers = {"width": "i32", "outputs": "i32", "epsilon": "fp32"}
    signature = {name: "constexpr" if name in constants else numbers.get(name, "*bf16") for name in names}
    aligned = [place for place, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")]
    source = ASTSource(
        linear_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": TILES.warps, "launch_pdl": chained}
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert result.metadata.shared <= A10.shared
    assert ("griddepcontrol" in result.asm["ptx"]) is chained


FORMS = {"4 bits": (128, 128, 4, False), "q4_0": (32, 32, 4, False), "8 bits": (128, 128, 8, False),
         "floats": (128, 128, 8, True)}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "dtype", "form"),
    [*((90, "bf16", form) for form in FORMS), (86, "fp16", "4 bits"), (86, "bf16", "floats"), (90, "fp32", "4 bits")],
)
@pytest.mark.parametrize(
    "kernel", [few_rows_kernel, unpack_kernel, grouped_row_kernel], ids=lambda kernel: kernel.__name__
)
def test_the_kernels_of_few_bits_compile(kernel: Any, architecture: int, dtype: str, form: str) -> None:
    chunk, group, bits, floats = FORMS[form]
    native = floats and architecture >= 89
    constants = {
        "ROWS": 64, "OUTPUTS": 8 if kernel is not few_rows_kernel else 64, "STEP": 128, "CHUNKS": 8, "STAGES": 3,
        "CHUNK": chunk, "GROUP": group, "BITS": bits, "FLOATS": floats, "NATIVE": native, "ZERO": 8,
        "ZEROED": not floats, "BIASED": True, "PARTIAL": False, "SCALED": True, "GATED": kernel is grouped_row_kernel,
        "ADDED": True, "CHAINED": architecture >= 90,
    }  # fmt: skip
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {"weight": "*u8", "zeros": "*u8", "scales": "*fp16", "epsilon": "fp32"}
    numbers = dict.fromkeys(("count", "width", "outputs", "groups", "steps", "bytes_of_line"), "i32")
    signature = {name: "constexpr" if name in constants else (types | numbers).get(name, f"*{dtype}") for name in names}
    aligned = [place for place, name in enumerate(names) if signature[name].startswith("*") or name == "width"]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    assert result.metadata.shared <= A10.shared
