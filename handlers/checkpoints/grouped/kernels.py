"""Triton kernels for weights in few bits: products of few rows, and weights unpacked for many.

A weight is `scale * (number - zero)`, with a scale for each group of inputs and each output. Numbers of 4 bits lie two
in a byte: a chunk of inputs has its first half in the lower bits, and its second half above. So a tile of bytes is two
tiles of numbers, each for inputs that follow each other.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806 - Triton's constants are written in capitals

import triton
import triton.language as tl

# Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
_WIDENS = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def add_product(left, right, added):
    """Return `added` + `left` @ `right` in float32, with `left` rounded to the type of `right`."""
    left = left.to(right.dtype)
    if _WIDENS:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, added, input_precision="ieee")


@triton.jit
def float8(packed, NATIVE: tl.constexpr):
    """E4M3 in bytes -> float32. NATIVE: the GPU converts such; otherwise bits become those of 1 / 256 in float16."""
    if NATIVE:
        return packed.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    bits = packed.to(tl.int16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def whole(number, zero):
    """Return `number - zero` of integers in bytes as float32.

    The mantissa of 2 ** 23 counts by ones, so that an integer is converted by setting bits: a GPU does that faster.
    """
    return (number.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)


# Four bytes of two numbers each become 16-bit floats of 128 or 1024 and the number, two in a register, from which the
# third operand is taken. {one} is 1.0 twice, {base} the upper byte of such a float four times.
_HALVES = """
{{
.reg .b32 low, high, upper, one;
mov.b32 upper, {base};
mov.b32 one, {one};
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, upper, 0x4140;
prmt.b32 $1, low, upper, 0x4342;
prmt.b32 $2, high, upper, 0x4140;
prmt.b32 $3, high, upper, 0x4342;
fma.rn.{kind} $0, $0, one, $5;
fma.rn.{kind} $1, $1, one, $6;
fma.rn.{kind} $2, $2, one, $5;
fma.rn.{kind} $3, $3, one, $6;
}}
"""
_BF16 = tl.constexpr(_HALVES.format(base="0x43434343", one="0x3F803F80", kind="bf16x2"))
_FP16 = tl.constexpr(_HALVES.format(base="0x64646464", one="0x3C003C00", kind="f16x2"))


@triton.jit
def halves(packed, zero, DTYPE: tl.constexpr):
    """Return both numbers of each byte less `zero`, in `DTYPE`, where these are exact."""
    if _WIDENS or tl.float32 == DTYPE:
        both = whole(packed & 15, zero).to(DTYPE), whole(packed >> 4, zero).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        added = tl.broadcast_to(-128.0 - zero, packed.shape).to(tl.bfloat16)
        both = tl.inline_asm_elementwise(
            _BF16, "=&r,=&r,=&r,=&r,r,r,r", [packed, added], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        added = tl.broadcast_to(-1024.0 - zero, packed.shape).to(tl.float16)
        both = tl.inline_asm_elementwise(
            _FP16, "=&r,=&r,=&r,=&r,r,r,r", [packed, added], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    return both


@triton.jit
def _of_group(scales, zeros, line, is_line, groups, group, ZERO: tl.constexpr, ZEROED: tl.constexpr):
    """Return the scales and zeros of a group for some lines, (lines, 1) float32."""
    of_group = line * groups + group
    scale = tl.load(scales + of_group, mask=is_line, other=0.0).to(tl.float32)
    if ZEROED:
        zero = tl.load(zeros + of_group, mask=is_line, other=0).to(tl.float32)
    else:
        zero = tl.full(line.shape, ZERO, tl.float32)
    return scale[:, None], zero[:, None]


@triton.jit
def few_rows_kernel(
    rows,
    weight,
    scales,
    zeros,
    bias,
    out,
    count,
    width,
    outputs,
    bytes_of_line,
    groups,
    steps,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    NATIVE: tl.constexpr,
    ZERO: tl.constexpr,
    ZEROED: tl.constexpr,
    BIASED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Multiply rows (count, width) by a weight (outputs, bytes_of_line).

    Grid: (outputs / OUTPUTS, splits, count / ROWS). A program adds up `steps` tiles of STEP inputs. PARTIAL: `out` is
    (splits, count, outputs) float32; otherwise it is (count, outputs), and `bias` is added if BIASED. A tile whose
    inputs have one scale is scaled after its product, others number by number. FLOATS: numbers are E4M3, which NATIVE
    GPUs convert. ZEROED: `zeros` (outputs, groups) uint8 are the numbers that mean zero, otherwise ZERO is.
    """
    line = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_line, is_row = line < outputs, row < count
    AFTER: tl.constexpr = GROUP % STEP == 0
    BYTES: tl.constexpr = STEP * BITS // 8
    PART: tl.constexpr = CHUNK * BITS // 8
    place = tl.arange(0, BYTES)
    offset = place // PART * CHUNK + place % PART
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    begin = split * steps * STEP
    last = tl.minimum(begin + steps * STEP, width)
    if AFTER:
        scale, zero = _of_group(scales, zeros, line, is_line, groups, begin // GROUP, ZERO, ZEROED)
    for start in range(begin, last, STEP):
        inputs = start + offset
        inside = inputs < width
        tile = is_line[:, None] & inside[None, :]
        packed = tl.load(
            weight + line[:, None] * bytes_of_line + (start * BITS // 8 + place)[None, :], mask=tile, other=0
        )
        if AFTER:  # what the next step is scaled by is on its way during this one
            group = tl.minimum(start + STEP, width - 1) // GROUP
            next_scale, next_zero = _of_group(scales, zeros, line, is_line, groups, group, ZERO, ZEROED)
        else:
            of_inputs = line[:, None] * groups + (inputs // GROUP)[None, :]
            scale = tl.load(scales + of_inputs, mask=tile, other=0.0).to(tl.float32)
            if ZEROED:
                zero = tl.load(zeros + of_inputs, mask=tile, other=0).to(tl.float32)
            else:
                zero = tl.full((OUTPUTS, 1), ZERO, tl.float32)
        given = rows + row[None, :] * width + inputs[:, None]
        seen = inside[:, None] & is_row[None, :]
        first = tl.load(given, mask=seen, other=0.0)
        if BITS == 4:
            second = tl.load(given + CHUNK // 2, mask=seen, other=0.0)
            low, high = halves(packed, zero, rows.dtype.element_ty)
        else:
            low = float8(packed, NATIVE) if FLOATS else whole(packed, zero)
        if AFTER:
            part = add_product(low, first, tl.zeros((OUTPUTS, ROWS), tl.float32))
            if BITS == 4:
                part = add_product(high, second, part)
            sums += part * scale
            scale, zero = next_scale, next_zero
        else:
            sums = add_product(low * scale, first, sums)
            if BITS == 4:
                sums = add_product(high * scale, second, sums)
    if PARTIAL:
        target = out + split.to(tl.int64) * count * outputs
    else:
        target = out
        if BIASED:
            sums += tl.load(bias + line, mask=is_line, other=0.0).to(tl.float32)[:, None]
    tl.store(
        target + row[None, :] * outputs + line[:, None],
        sums.to(out.dtype.element_ty),
        mask=is_line[:, None] & is_row[None, :],
    )


@triton.jit
def sum_kernel(partial, bias, out, size, outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr):
    """Add up (SPLITS, size) float32 into `out`, (size,), lines of `outputs`. Grid: (size / BLOCK,)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * size + place, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unpack_kernel(
    weight,
    scales,
    zeros,
    out,
    width,
    outputs,
    bytes_of_line,
    groups,
    OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    NATIVE: tl.constexpr,
    ZERO: tl.constexpr,
    ZEROED: tl.constexpr,
):
    """Write a weight as (outputs, width) in the type of `out`. Grid: (chunks of inputs, outputs / OUTPUTS)."""
    chunk = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_line = line < outputs
    PART: tl.constexpr = CHUNK * BITS // 8
    place = tl.arange(0, PART)
    packed = tl.load(
        weight + line[:, None] * bytes_of_line + (chunk * PART + place)[None, :], mask=is_line[:, None], other=0
    )
    scale, zero = _of_group(scales, zeros, line, is_line, groups, chunk * CHUNK // GROUP, ZERO, ZEROED)
    target = out + line[:, None] * width + (chunk * CHUNK + place)[None, :]
    low = float8(packed, NATIVE) if FLOATS else whole(packed & 15 if BITS == 4 else packed, zero)
    tl.store(target, (low * scale).to(out.dtype.element_ty), mask=is_line[:, None])
    if BITS == 4:
        high = whole(packed >> 4, zero)
        tl.store(target + CHUNK // 2, (high * scale).to(out.dtype.element_ty), mask=is_line[:, None])
