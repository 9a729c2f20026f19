"""Products of rows of integers and blocks of few bits, whose sums are scaled in float32.

The first rows are multiplied by what registers unpack. On the way a section of blocks is laid: its unpacked numbers and
its scales in float32 are written to memory, and stay in the L1 cache while the other rows are multiplied by them. Sums
of products are exact, and those of a row are scaled and added in one order: it gets the same bits whatever the others
are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks.layout import FIRST_PANEL, GROUPS, INPUTS, KINDS, OUTPUTS, PANEL_WORDS, Kind
from handlers.cpu_kernels.blocks.numbers import AHEAD_BYTES
from handlers.cpu_kernels.blocks.products import address_of
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind
from handlers.cpu_kernels.blocks.vectors import FLOAT, FLOATS, INT, WORD, WORDS, load_at, multiply_add, scaled, store_at
from handlers.cpu_kernels.compilation.decorators import kernel_part
from handlers.cpu_kernels.inlined import fill
from handlers.cpu_kernels.intrinsics import LANES, empty, prefetch_line, spread

HALVES = range(2)  # of the outputs
_LINE = 4 * LANES  # bytes of a vector, and of a line of the caches


class Form(NamedTuple):
    """How blocks of some kinds multiply rows of integers.

    A group of inputs takes `steps`: each adds the products of a word of a row and of a vector for each half of the
    outputs. `numbers(builder, block, group)` yields these vectors, `add(builder, total, vector, words)` adds. A block
    of a row has `row_bytes`: the words, and their scale and their sum as float32 at some places among them. Sums begin
    with the word at `begin_at(kind, group)`, or with zero.
    """

    kinds: Sequence[Kind]
    steps: int
    numbers: Callable[..., Iterator[Sequence[Any]]]
    add: Callable[..., Any]
    row_bytes: int
    scale_at: int
    sum_at: int
    begin_at: Callable[[Kind, int], int] | None = None

    @property
    def scales_at(self) -> int:
        """How many bytes the scales of a laid block are behind its beginning."""
        return 2 * _LINE * self.steps * GROUPS

    @property
    def minima_at(self) -> int:
        """How many bytes its minima are behind it, or the scales of the second group."""
        return self.scales_at + 4 * OUTPUTS

    @property
    def laid_bytes(self) -> int:
        return self.minima_at + 4 * OUTPUTS

    def alike(self) -> Iterable[list[Kind]]:
        """Return kinds by what laid blocks of them have: minima, and scales of groups."""
        found: dict[tuple[bool, int], list[Kind]] = {}
        for kind in self.kinds:
            found.setdefault((kind.has_minimum, kind.scales), []).append(kind)
        return found.values()

    def begins(self, builder, code, kinds: Sequence[Kind]) -> list[Any]:
        """Return where the words are that sums begin with: for each scale of some kinds. `code` is that of one."""
        if self.begin_at is None:
            return [None] * kinds[0].scales
        found = []
        for groups in kinds[0].scaled_groups:
            place = INT(self.begin_at(kinds[0], groups[0]))
            for kind in kinds[1:]:
                is_kind = builder.icmp_signed("==", code, INT(kind.code))
                place = builder.select(is_kind, INT(self.begin_at(kind, groups[0])), place)
            found.append(place)
        return found


class _Stored(NamedTuple):
    """The weights of a block, which registers unpack."""

    form: Form
    builder: Any
    block: Block

    @property
    def kind(self) -> Kind:
        return self.block.kind

    def numbers(self, group: int) -> Iterator[Sequence[Any]]:
        """Yield the vectors of a group's steps, those of both halves of the outputs."""
        return self.form.numbers(self.builder, self.block, group)

    def scale(self, half: int, group: int) -> Any:
        """Return the scales of half the outputs, of a group if its groups have their own."""
        return self.block.scales.of_half(half, group)

    def minimum(self, half: int) -> Any:
        """Return the minima of half the outputs with the sign changed."""
        return self.builder.fneg(self.block.scales.minima_of_half(half))


class _Laid(NamedTuple):
    """The weights of a block that was laid at an address."""

    form: Form
    builder: Any
    kind: Kind
    address: Any

    def numbers(self, group: int) -> Iterator[Sequence[Any]]:
        for step in range(self.form.steps * group, self.form.steps * (group + 1)):
            yield [load_at(self.builder, self.address, _LINE * (2 * step + half), WORDS) for half in HALVES]

    def scale(self, half: int, group: int) -> Any:
        offset = self.form.scales_at + 4 * OUTPUTS * group + _LINE * half
        return load_at(self.builder, self.address, offset, FLOATS)

    def minimum(self, half: int) -> Any:
        return load_at(self.builder, self.address, self.form.minima_at + _LINE * half, FLOATS)


class _Laying(NamedTuple):
    """The weights of a block, which registers unpack and which are laid at an address meanwhile."""

    stored: _Stored
    address: Any

    @property
    def form(self) -> Form:
        return self.stored.form

    @property
    def kind(self) -> Kind:
        return self.stored.kind

    def numbers(self, group: int) -> Iterator[Sequence[Any]]:
        for step, vectors in enumerate(self.stored.numbers(group), self.form.steps * group):
            for half in HALVES:
                self._write(vectors[half], _LINE * (2 * step + half))
            yield vectors

    def scale(self, half: int, group: int) -> Any:
        return self._write(self.stored.scale(half, group), self.form.scales_at + 4 * OUTPUTS * group + _LINE * half)

    def minimum(self, half: int) -> Any:
        return self._write(self.stored.minimum(half), self.form.minima_at + _LINE * half)

    def _write(self, vector, offset: int) -> Any:
        store_at(self.stored.builder, vector, self.address, offset)
        return vector


@intrinsic
def _begin_of(context, code, panel, number):
    """Return the address of a block of the panel of a kind, by its number."""

    def build(ctx, builder, sig, args):
        code, panel, number = args
        found = panel
        for kind in KINDS:
            before, inside = (getattr(builder, name)(number, INT(kind.blocks)) for name in ("udiv", "urem"))
            offset = builder.add(builder.mul(before, INT(kind.super_bytes)), builder.mul(inside, INT(kind.block_bytes)))
            found = builder.select(builder.icmp_signed("==", code, INT(kind.code)), builder.add(panel, offset), found)
        return found

    return types.uintp(types.int64, types.uintp, types.intp), build


def multiplying_laid(form: Form, rows: int) -> Any:
    """Return the intrinsic that multiplies a group of so many rows by laid blocks."""

    @intrinsic
    def multiply_laid(context, code, laid, blocks, inputs, sums, ahead, lines):
        """Add the products of a group of rows and blocks to `sums`, OUTPUTS float32 for each row.

        inputs: the address of what all rows have for the first of these blocks; what they have for the next ones
        follows. With each block so many lines are asked for, from the address `ahead` on: memory is read meanwhile.
        """

        def build(ctx, builder, sig, args):
            code, laid, blocks, inputs, sums, ahead, lines = args
            for kinds in form.alike():

                def laid_at(index, kind=kinds[0]):
                    with cgutils.for_range(builder, lines) as loop:
                        line = builder.add(builder.mul(index, lines), loop.index)
                        prefetch_line(builder, builder.add(ahead, builder.mul(line, INT(_LINE))))
                    address = builder.add(laid, builder.mul(index, INT(form.laid_bytes)))
                    return _Laid(form, builder, kind, address)

                is_one = [builder.icmp_signed("==", code, INT(kind.code)) for kind in kinds]
                with builder.if_then(_any(builder, is_one)):
                    _multiply(builder, laid_at, blocks, form.begins(builder, code, kinds), inputs, sums, rows)
            return ctx.get_dummy_value()

        given = types.int64, types.uintp, types.intp, types.uintp, types.uintp, types.uintp, types.intp
        return types.void(*given), build

    return multiply_laid


def multiplying_stored(form: Form, rows: int, distance: int, lays: bool = False) -> Any:
    """Return the intrinsic that multiplies a group of so many rows by blocks as they are stored.

    It lays these if it `lays`. `distance`: see Numbers.
    """

    @intrinsic
    def multiply_stored(context, code, panel, first, blocks, inputs, sums, laid):
        """Add the products of a group of rows and blocks from `first` on, as `multiply_laid` does; see there."""

        def build(ctx, builder, sig, args):
            code, panel, first, blocks, inputs, sums, laid = args

            def of_kind(kind):
                def weights_at(index):
                    block = block_at(builder, kind, panel, builder.add(first, index), distance)
                    stored = _Stored(form, builder, block)
                    address = builder.add(laid, builder.mul(index, INT(form.laid_bytes)))
                    return _Laying(stored, address) if lays else stored

                _multiply(builder, weights_at, blocks, form.begins(builder, code, [kind]), inputs, sums, rows)

            for_kind(builder, code, of_kind, form.kinds)
            return ctx.get_dummy_value()

        given = types.int64, types.uintp, types.intp, types.intp, types.uintp, types.uintp, types.uintp
        return types.void(*given), build

    return multiply_stored


def _any(builder, conditions):
    first, *others = conditions
    for other in others:
        first = builder.or_(first, other)
    return first


def _multiply(builder, weights_at, blocks, begins, inputs, sums, rows: int) -> None:
    """Multiply rows at an address and add to the sums at another. `begins`: see `Form`, for each scale of a block."""
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in HALVES] for _ in range(rows)]
    for row, of_row in enumerate(totals):
        for half, total in enumerate(of_row):
            builder.store(load_at(builder, sums, 4 * OUTPUTS * row + _LINE * half, FLOATS), total)
    with cgutils.for_range(builder, blocks) as loop:
        weights = weights_at(loop.index)
        begin = builder.add(inputs, builder.mul(loop.index, INT(rows * weights.form.row_bytes)))
        for groups, place in zip(weights.kind.scaled_groups, begins, strict=True):
            _add(builder, weights, groups, place, begin, totals)
    for row, of_row in enumerate(totals):
        for half, total in enumerate(of_row):
            store_at(builder, builder.load(total), sums, 4 * OUTPUTS * row + _LINE * half)


def _add(builder, weights: _Stored | _Laying | _Laid, groups: Sequence[int], begin, inputs, totals) -> None:
    """Add the products of those groups of a block that have one scale to totals of each row."""
    form = weights.form

    def spread_at(row: int, offset: int, kind, vector, more=None):
        address = inputs if more is None else builder.add(inputs, more)
        return spread(builder, load_at(builder, address, form.row_bytes * row + offset, kind), vector)

    zero = ir.Constant(WORDS, None)
    sums = [[zero if begin is None else spread_at(row, 0, WORD, WORDS, begin)] * 2 for row in range(len(totals))]
    for group in groups:
        for step, vectors in enumerate(weights.numbers(group), form.steps * group):
            for row, of_row in enumerate(sums):
                factors = spread_at(row, 4 * step, WORD, WORDS)
                for half in HALVES:
                    of_row[half] = form.add(builder, of_row[half], vectors[half], factors)
    scales = [weights.scale(half, groups[0]) for half in HALVES]
    minima = [weights.minimum(half) for half in HALVES] if weights.kind.has_minimum else [None, None]
    for row, (of_row, of_totals) in enumerate(zip(sums, totals, strict=True)):
        scale, of_inputs = (spread_at(row, place, FLOAT, FLOATS) for place in (form.scale_at, form.sum_at))
        for half, total in enumerate(of_totals):
            found = scaled(builder, of_row[half], scales[half], minima[half], of_inputs)
            builder.store(multiply_add(builder, found, scale, builder.load(total)), total)


def in_sections(form: Form, rows: int, few: int, section: int) -> tuple[Any, int]:
    """Return a part of kernels that adds the products of groups of rows and a panel, and how many bytes it lays.

    Up to `few` groups are multiplied as blocks are stored, more groups by sections of at most so many blocks.
    """
    multiply_stored, multiply_laid = multiplying_stored(form, rows, AHEAD_BYTES), multiplying_laid(form, rows)
    multiply_and_lay = multiplying_stored(form, rows, 0, lays=True)
    of_group, few_groups, most = (np.int64(number) for number in (rows, few, section))

    @kernel_part(is_separate=True)
    def add_products(weight, panel, inputs, laid, sums):
        """Add the products of rows and a panel. inputs (groups, blocks, rows, bytes); laid, the bytes to lay."""
        place = FIRST_PANEL + PANEL_WORDS * panel
        code, source, target = weight[place], address_of(weight) + np.uintp(weight[place + 1]), address_of(laid)
        groups, blocks = inputs.shape[:2]
        here = blocks if groups == 1 else -(-blocks // -(-blocks // most))
        for block in range(0, blocks, here):
            of_section = min(here, blocks - block)
            if groups <= few_groups:
                for group in range(groups):
                    given, totals = address_of(inputs[group, block]), address_of(sums[of_group * group])
                    multiply_stored(code, source, block, of_section, given, totals, target)
                continue
            multiply_and_lay(code, source, block, of_section, address_of(inputs[0, block]), address_of(sums), target)
            ahead = _begin_of(code, source, block + of_section)
            size = np.int64(ahead - _begin_of(code, source, block))
            lines = -(-size // (_LINE * of_section * (groups - 1)))
            for group in range(1, groups):
                given, totals = address_of(inputs[group, block]), address_of(sums[of_group * group])
                multiply_laid(code, target, of_section, given, totals, ahead, lines)
                ahead += np.uintp(_LINE * of_section * lines)

    return add_products, section * form.laid_bytes


@kernel_part()
def groups_of(rows, of_group, row_bytes):
    """Return space for the blocks of rows in groups, (groups, blocks, rows, bytes); rows that are not there are 0."""
    count, blocks = rows.shape[0], rows.shape[1] // INPUTS
    groups = -(-count // of_group)
    found = empty((groups, blocks, of_group, row_bytes), np.uint8)
    for row in range(count, groups * of_group):
        fill(found[-1, :, row % of_group], np.uint8(0))
    return found
