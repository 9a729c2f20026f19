"""A Triton kernel for the linear layers of a pass with one row, which is bound by reading weights.

A decoder layer of Llama's structure takes four launches of it. What stands between its products, norms, gates and sums
with the residual stream, is computed where the products begin and end, so that the GPU waits for few launches.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803 - Triton's constants are written in capitals

import triton
import triton.language as tl
from triton.language.extra import cuda as hopper


@triton.jit
def _weights(weight, line, inside, start, width, STEP: tl.constexpr):
    """Return columns `start` to `start + STEP` of the lines of a weight, (lines, STEP)."""
    column = start + tl.arange(0, STEP)
    mask = inside[:, None] & (column < width)[None, :]
    return tl.load(
        weight + line[:, None] * width + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def linear_kernel(
    row,
    scale,
    weight,
    weight_scales,
    bias,
    residual,
    out,
    width,
    outputs,
    epsilon,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    SCALED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Multiply `row`, (width,), by `weight`, (outputs, width), into `out`, (outputs,). Grid: (outputs / OUTPUTS,).

    SCALED: the row is divided by its root mean square and multiplied by `scale`, (width,), before. The division comes
    last, so that the row is read once. ROUNDED: the weight is in 8-bit floats, with `weight_scales` by outputs. BIASED:
    `bias` is added. GATED: the weight is (2 * outputs, width), gates first, and a result is `silu(gate) * other`.
    ADDED: `residual`, (outputs,), is added. What transformers' code rounds is rounded, but for the scaled row. CHAINED:
    the launch begins before the one in front of it has ended.
    """
    if CHAINED:
        hopper.gdc_launch_dependents()
    first, line, inside = lines(OUTPUTS, GATED, outputs)
    sums = tl.zeros((line.shape[0], STEP), tl.float32)
    squares = tl.zeros((STEP,), tl.float32)
    # The weights of a step are on their way while those of the one before are multiplied. The first do not wait for the
    # launch before this one.
    own = _weights(weight, line, inside, 0, width, STEP)
    if CHAINED:
        hopper.gdc_wait()
    for start in range(0, width, STEP):
        following = _weights(weight, line, inside, start + STEP, width, STEP)
        column = start + tl.arange(0, STEP)
        given = tl.load(row + column, mask=column < width, other=0.0).to(tl.float32)
        if SCALED:
            squares += given * given
            given *= tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
        sums += own.to(tl.float32) * given[None, :]
        own = following
    exact = tl.sum(sums, 1)
    if SCALED:
        exact *= 1.0 / tl.sqrt(tl.sum(squares, 0) / width + epsilon)
    if ROUNDED:
        exact *= tl.load(weight_scales + line, mask=inside, other=0.0)
    finish(exact, bias, residual, out, first, line, inside, outputs, OUTPUTS, BIASED, GATED, ADDED)


@triton.jit
def lines(OUTPUTS: tl.constexpr, GATED: tl.constexpr, outputs):
    """Return the first output of a program, the lines of the weight that it reads, and which of these there are."""
    first = tl.program_id(0).to(tl.int64) * OUTPUTS
    place = tl.arange(0, OUTPUTS * 2 if GATED else OUTPUTS)
    if GATED:
        output = first + place // 2
        line = output + (place % 2) * outputs
    else:
        output = first + place
        line = output
    return first, line, output < outputs


@triton.jit
def finish(
    exact,
    bias,
    residual,
    out,
    first,
    line,
    inside,
    outputs,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Store the products of a program's lines, (lines,) float32, with what belongs to them; see `linear_kernel`."""
    if BIASED:
        exact += tl.load(bias + line, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    result = exact.to(dtype)
    target = first + tl.arange(0, OUTPUTS)
    if GATED:
        gate, other = tl.split(tl.reshape(result, (OUTPUTS, 2)))
        opened = gate.to(tl.float32)
        activated = (opened / (1.0 + tl.exp(-opened))).to(dtype).to(tl.float32)
        result = (activated * other.to(tl.float32)).to(dtype)
    if ADDED:
        before = tl.load(residual + target, mask=target < outputs, other=0.0).to(tl.float32)
        result = (before + result.to(tl.float32)).to(dtype)
    tl.store(out + target, result, mask=target < outputs)
