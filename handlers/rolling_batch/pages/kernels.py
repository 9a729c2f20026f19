"""Triton kernels for attention over a KV cache in pages (PagedAttention, Kwon et al., SOSP 2023).

All tensors are contiguous but for their rows, whose stride is an argument. Pages are (pages, kv_heads, PAGE, dim), and
`tables`, (slots, pages of the longest sequence) int32, has the page of every PAGE tokens of the sequence in a slot.
Dimensions that are no powers of two are padded and masked. Scores are in float32, as powers of two.

Nothing is read that a row must not see but keys in the page of its last token, whose scores are masked: what former
sequences left in a page, not even NaN, does not matter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803 - Triton's constants are written in capitals

import triton
import triton.language as tl
from triton.language.extra import cuda as hopper

_LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
_WIDENS = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _product(left, right, added):
    """Return `added` + `left` @ `right`, in float32; float32 is not rounded to TF32."""
    if _WIDENS:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, added, input_precision="ieee")


@triton.jit
def write_kernel(
    key,
    value,
    key_pages,
    value_pages,
    tables,
    slots,
    positions,
    key_stride,
    value_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Write keys and values, (rows, kv_heads, dim), to the pages of their slots. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    page = tl.load(tables + slot * table_stride + position // PAGE).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    line = (page * KV_HEADS + head) * PAGE + position % PAGE
    dim = tl.arange(0, DIM_PAD)[None, :]
    inside = (head < KV_HEADS) & (dim < DIM)
    tl.store(key_pages + line * DIM + dim, tl.load(key + row * key_stride + head * DIM + dim, mask=inside), mask=inside)
    dim = tl.arange(0, VALUE_PAD)[None, :]
    inside = (head < KV_HEADS) & (dim < VALUE_DIM)
    own = tl.load(value + row * value_stride + head * VALUE_DIM + dim, mask=inside)
    tl.store(value_pages + line * VALUE_DIM + dim, own, mask=inside)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first token that the one at `position` sees: of a window, of a chunk, or the first of all."""
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - (WINDOW - 1), 0)
    if CHUNK:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _tiles_of_split(first, end, splits, TILE: tl.constexpr):
    """Return the first tile that has a token of `first:end`, and how many tiles each of `splits` splits gets."""
    begin = first // TILE
    return begin, tl.cdiv(tl.cdiv(end, TILE) - begin, splits)


@triton.jit
def _attend(
    query,
    key_pages,
    value_pages,
    table,
    column,
    end,
    first,
    last,
    head,
    best,
    total,
    summed,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a tile of columns to the running softmax of rows that see the tokens `first` to `last`, (rows, 1) each.

    Columns from `end` on are no tokens. `best` is the greatest score so far, `total` the sum of the weights, and
    `summed` that of the weighted values. If not MASKED, every row sees every column of the tile.
    """
    inside = column < end if MASKED else column >= 0
    page = tl.load(table + column // PAGE, mask=inside, other=0).to(tl.int64)
    line = (page * KV_HEADS + head) * PAGE + column % PAGE
    dim = tl.arange(0, DIM_PAD)[None, :]
    key = tl.load(key_pages + line[:, None] * DIM + dim, mask=inside[:, None] & (dim < DIM), other=0.0)
    scores = _product(query, tl.trans(key), tl.zeros((query.shape[0], column.shape[0]), tl.float32))
    if SOFTCAP > 0:
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (scale * (2.0 / SOFTCAP))) - 1.0) * _LOG2_E  # tanh
    else:
        scores *= scale * _LOG2_E
    if MASKED:
        seen = (column[None, :] >= first) & (column[None, :] <= last) & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    most = tl.maximum(best, tl.max(scores, 1))
    base = most
    if MASKED:
        base = tl.where(most == float("-inf"), 0.0, most)  # a row that has seen nothing has no weights yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    dim = tl.arange(0, VALUE_PAD)[None, :]
    value = tl.load(value_pages + line[:, None] * VALUE_DIM + dim, mask=inside[:, None] & (dim < VALUE_DIM), other=0.0)
    summed = _product(weights.to(value.dtype), value, summed * shrink[:, None])
    return most, total * shrink + tl.sum(weights, 1), summed


@triton.jit
def decode_kernel(
    query,
    key_pages,
    value_pages,
    tables,
    slots,
    positions,
    sinks,
    partial,
    weights,
    out,
    scale,
    query_stride,
    table_stride,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DIRECT: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    """Attend for rows of one token each. Grid: (rows, kv_heads, splits of the context). One at position -1 stays.

    The query heads that share a head of keys are one tile. `query` is (rows, heads, DIM). If DIRECT, there is one
    split, and `out`, (rows, heads, VALUE_DIM), gets the result. Otherwise `partial`, (rows, heads, splits, VALUE_DIM)
    float32, gets the weighted values of each split that has columns, and `weights`, (rows, heads, splits, 2), its
    greatest score and the sum of its weights. CHAINED: the launch begins before the one in front of it has ended.
    """
    if CHAINED:
        hopper.gdc_launch_dependents()
        hopper.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    position = tl.load(positions + row)
    first = _first_seen(position, WINDOW, CHUNK)
    tile, tiles = _tiles_of_split(first, position + 1, splits, TILE)
    begin = (tile + split * tiles) * TILE
    end = tl.minimum(begin + tiles * TILE, position + 1)
    if begin >= end:
        return
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_PAD)[None, :]
    own = (member < GROUP)[:, None]
    queries = tl.load(query + row * query_stride + head[:, None] * DIM + dim, mask=own & (dim < DIM), other=0.0)
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    summed = tl.zeros((GROUP_PAD, VALUE_PAD), tl.float32)
    if DIRECT and SINKS:
        best = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32) * _LOG2_E
        total += 1.0
    for start in range(begin, end, TILE):
        best, total, summed = _attend(
            queries,
            key_pages,
            value_pages,
            table,
            start + tl.arange(0, TILE),
            end,
            first,
            position,
            kv_head,
            best,
            total,
            summed,
            scale,
            KV_HEADS,
            DIM,
            DIM_PAD,
            VALUE_DIM,
            VALUE_PAD,
            PAGE,
            SOFTCAP,
            True,
        )
    dim = tl.arange(0, VALUE_PAD)[None, :]
    inside = own & (dim < VALUE_DIM)
    line = row * (KV_HEADS * GROUP) + head
    if DIRECT:
        result = summed / total[:, None]
        tl.store(out + line[:, None] * VALUE_DIM + dim, result.to(out.dtype.element_ty), mask=inside)
    else:
        line = line * splits + split
        tl.store(partial + line[:, None] * VALUE_DIM + dim, summed, mask=inside)
        tl.store(weights + line * 2, best, mask=member < GROUP)
        tl.store(weights + line * 2 + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    partial,
    weights,
    positions,
    sinks,
    out,
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    """Add up the splits of `decode_kernel` (the second pass of flash-decoding). Grid: (rows, heads)."""
    if CHAINED:
        hopper.gdc_launch_dependents()
        hopper.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    tile, tiles = _tiles_of_split(_first_seen(position, WINDOW, CHUNK), position + 1, splits, TILE)
    split = tl.arange(0, SPLITS_PAD)
    used = (split < splits) & ((tile + split * tiles) * TILE <= position)
    line = (row * HEADS + head) * splits + split
    best = tl.load(weights + line * 2, mask=used, other=float("-inf"))
    total = tl.load(weights + line * 2 + 1, mask=used, other=0.0)
    most = tl.max(best, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        most = tl.maximum(most, sink)
    share = tl.exp2(best - most)
    whole = tl.sum(share * total, 0)
    if SINKS:
        whole += tl.exp2(sink - most)
    dim = tl.arange(0, VALUE_PAD)
    inside = used[:, None] & (dim < VALUE_DIM)[None, :]
    summed = tl.load(partial + line[:, None] * VALUE_DIM + dim[None, :], mask=inside, other=0.0)
    result = tl.sum(summed * share[:, None], 0) / whole
    tl.store(out + (row * HEADS + head) * VALUE_DIM + dim, result.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


@triton.jit
def chunk_kernel(
    query,
    key_pages,
    value_pages,
    tables,
    chunks,
    ends,
    sinks,
    out,
    scale,
    query_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCKS: tl.constexpr = False,
):
    """Attend for chunks of prompts, whose own keys and values are in their pages already.

    Grid: (tiles of ROWS rows of the longest chunk, heads, chunks). `chunks`, (chunks, 4) int32, has for each its first
    row in `query`, its number of rows, the position of its first row, and its slot. With BLOCKS, `ends`, (rows,) int32,
    has the last token that each row sees, its own one or a later one of its chunk.
    """
    head = tl.program_id(1)
    chunk = chunks + tl.program_id(2) * 4
    first_row = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    start = tl.load(chunk + 2)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # tiles that see the most columns come first
    if tile >= count:
        return
    table = tables + tl.load(chunk + 3).to(tl.int64) * table_stride
    row = tile + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)[None, :]
    line = (first_row + row)[:, None]
    inside = (row < count)[:, None]
    queries = tl.load(query + line * query_stride + head * DIM + dim, mask=inside & (dim < DIM), other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, VALUE_PAD), tl.float32)
    if SINKS:
        best = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total += 1.0
    position = start + row
    first = _first_seen(position, WINDOW, CHUNK)[:, None]
    last = position[:, None]
    begin = _first_seen(start + tile, WINDOW, CHUNK) // TILE * TILE
    end = start + tl.minimum(tile + ROWS, count)
    if BLOCKS:
        seen = tl.load(ends + first_row + row, mask=row < count, other=0)
        last = seen[:, None]
        end = tl.maximum(end, tl.max(seen, 0) + 1)
    # Columns that all rows see need no mask: from the first one that the last row sees up to the first row's own.
    full = tl.maximum(begin, tl.cdiv(_first_seen(start + tile + ROWS - 1, WINDOW, CHUNK), TILE) * TILE)
    diagonal = tl.maximum(full, (start + tile + 1) // TILE * TILE)
    kv_head = head // (HEADS // KV_HEADS)
    if WINDOW or CHUNK:
        for column in range(begin, tl.minimum(full, end), TILE):
            best, total, summed = _attend(
                queries, key_pages, value_pages, table, column + tl.arange(0, TILE), end, first, last,
                kv_head, best, total, summed, scale, KV_HEADS, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, SOFTCAP, True,
            )  # fmt: skip
    for column in range(full, tl.minimum(diagonal, end), TILE):
        best, total, summed = _attend(
            queries, key_pages, value_pages, table, column + tl.arange(0, TILE), end, first, last,
            kv_head, best, total, summed, scale, KV_HEADS, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, SOFTCAP, False,
        )  # fmt: skip
    for column in range(diagonal, end, TILE):
        best, total, summed = _attend(
            queries, key_pages, value_pages, table, column + tl.arange(0, TILE), end, first, last,
            kv_head, best, total, summed, scale, KV_HEADS, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, SOFTCAP, True,
        )  # fmt: skip
    dim = tl.arange(0, VALUE_PAD)[None, :]
    result = summed / tl.where(total > 0, total, 1.0)[:, None]  # rows that pad a tile may see nothing
    target = out + (line * HEADS + head) * VALUE_DIM + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=inside & (dim < VALUE_DIM))
