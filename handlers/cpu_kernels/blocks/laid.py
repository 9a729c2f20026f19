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
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind, is_read
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

    def begin_of(self, builder, laid, group):
        """Return the address of the numbers of a group in a laid block."""
        return builder.add(laid, builder.mul(group, INT(2 * _LINE * self.steps)))

    def scales_of(self, builder, laid, kind: Kind, group):
        """Return the address of the scales of a group, or of a block if its groups have one."""
        scales = builder.add(laid, INT(self.scales_at))
        return scales if kind.scales == 1 else builder.add(scales, builder.mul(group, INT(4 * OUTPUTS)))

    def begins(self, builder, code, kinds: Sequence[Kind]) -> list[Any]:
        """Return where the words are that sums begin with: for each scale of some kinds. `code` is that of one."""
        if self.begin_at is None:
            return [None] * kinds[0].scales
        found = []
        for group in range(kinds[0].scales):
            place = INT(self.begin_at(kinds[0], group))
            for kind in kinds[1:]:
                is_kind = builder.icmp_signed("==", code, INT(kind.code))
                place = builder.select(is_kind, INT(self.begin_at(kind, group)), place)
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

    def numbers(self, group) -> Iterator[Sequence[Any]]:
        """Yield the vectors of a group's steps, those of both halves of the outputs. Groups are known at run time."""
        return self.form.numbers(self.builder, self.block, group)

    def scale(self, half: int, group) -> Any:
        """Return the scales of half the outputs, of a group if groups have their own."""
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

    def numbers(self, group) -> Iterator[Sequence[Any]]:
        begin = self.form.begin_of(self.builder, self.address, group)
        for step in range(self.form.steps):
            yield [load_at(self.builder, begin, _LINE * (2 * step + half), WORDS) for half in HALVES]

    def scale(self, half: int, group) -> Any:
        begin = self.form.scales_of(self.builder, self.address, self.kind, group)
        return load_at(self.builder, begin, _LINE * half, FLOATS)

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

    def numbers(self, group) -> Iterator[Sequence[Any]]:
        begin = self.form.begin_of(self.stored.builder, self.address, group)
        for step, vectors in enumerate(self.stored.numbers(group)):
            for half in HALVES:
                store_at(self.stored.builder, vectors[half], begin, _LINE * (2 * step + half))
            yield vectors

    def scale(self, half: int, group) -> Any:
        scales, builder = self.stored.scale(half, group), self.stored.builder
        store_at(builder, scales, self.form.scales_of(builder, self.address, self.kind, group), _LINE * half)
        return scales

    def minimum(self, half: int) -> Any:
        minima = self.stored.minimum(half)
        store_at(self.stored.builder, minima, self.address, self.form.minima_at + _LINE * half)
        return minima


@intrinsic
def _begin_of(context, code, panel, number):
    """Return the address of a block of the panel of a kind, by its number."""

    def build(ctx, builder, sig, args):
        code, panel, number = args
        found = panel
        for kind in filter(is_read, KINDS):
            before, inside = (getattr(builder, name)(number, INT(kind.blocks)) for name in ("udiv", "urem"))
            offset = builder.add(builder.mul(before, INT(kind.super_bytes)), builder.mul(inside, INT(kind.block_bytes)))
            address = builder.add(builder.add(panel, INT(kind.header_bytes)), offset)
            found = builder.select(builder.icmp_signed("==", code, INT(kind.code)), address, found)
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


def multiplying_stored(form: Form, rows: int, distance_of: Callable[[Kind], int], lays: bool = False) -> Any:
    """Return the intrinsic that multiplies a group of so many rows by blocks as they are stored.

    It lays these if it `lays`. `distance_of`: a kind -> the distance, see Numbers.
    """

    @intrinsic
    def multiply_stored(context, code, panel, first, blocks, inputs, sums, laid):
        """Add the products of a group of rows and blocks from `first` on, as `multiply_laid` does; see there."""

        def build(ctx, builder, sig, args):
            code, panel, first, blocks, inputs, sums, laid = args

            def of_kind(kind):
                def weights_at(index):
                    block = block_at(builder, kind, panel, builder.add(first, index), distance_of(kind))
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
        _Products(builder, weights, begin, begins, totals).add()
    for row, of_row in enumerate(totals):
        for half, total in enumerate(of_row):
            store_at(builder, builder.load(total), sums, 4 * OUTPUTS * row + _LINE * half)


class _Products:
    """The products of a block and rows, whose inputs are at an address."""

    def __init__(self, builder, weights: _Stored | _Laying | _Laid, inputs, begins, totals) -> None:
        self._builder, self._weights, self._inputs = builder, weights, inputs
        self._begins, self._totals, self._rows = begins, totals, range(len(totals))
        self._sums = [[cgutils.alloca_once(builder, WORDS) for _ in HALVES] for _ in self._rows]

    def add(self) -> None:
        """Add them to the totals."""
        if self._weights.kind.scales > 1:
            self._for_groups(self._add_scaled)
            return
        self._begin(self._begins[0])
        self._for_groups(self._add_group)
        self._scale(INT(0))

    def _for_groups(self, add) -> None:
        """Laid blocks take 1 to 3 % less time without a loop. Other code would take long to compile."""
        if isinstance(self._weights, _Laid):
            for group in range(GROUPS):
                add(INT(group))
        else:
            with cgutils.for_range(self._builder, INT(GROUPS)) as loop:
                add(loop.index)

    def _add_scaled(self, group) -> None:
        first, second = self._begins
        is_first = self._builder.icmp_signed("==", group, INT(0))
        self._begin(None if first is None else self._builder.select(is_first, first, second))
        self._add_group(group)
        self._scale(group)

    def _begin(self, place) -> None:
        """Let sums begin with the word at a place of a row, or with zero."""
        for row in self._rows:
            address = None if place is None else self._builder.add(self._inputs, place)
            first = ir.Constant(WORDS, None) if address is None else self._spread(address, row, 0, WORD, WORDS)
            for half in HALVES:
                self._builder.store(first, self._sums[row][half])

    def _add_group(self, group) -> None:
        builder, form = self._builder, self._weights.form
        words = builder.add(self._inputs, builder.mul(group, INT(4 * form.steps)))
        for step, vectors in enumerate(self._weights.numbers(group)):
            for row, of_row in enumerate(self._sums):
                factors = self._spread(words, row, 4 * step, WORD, WORDS)
                for vector, total in zip(vectors, of_row, strict=True):
                    builder.store(form.add(builder, builder.load(total), vector, factors), total)

    def _scale(self, group) -> None:
        builder, weights = self._builder, self._weights
        scales = [weights.scale(half, group) for half in HALVES]
        minima = [weights.minimum(half) for half in HALVES] if weights.kind.has_minimum else [None, None]
        places = weights.form.scale_at, weights.form.sum_at
        for row in self._rows:
            scale, of_inputs = (self._spread(self._inputs, row, place, FLOAT, FLOATS) for place in places)
            for half, total in enumerate(self._totals[row]):
                sums = builder.load(self._sums[row][half])
                found = scaled(builder, sums, scales[half], minima[half], of_inputs)
                builder.store(multiply_add(builder, found, scale, builder.load(total)), total)

    def _spread(self, address, row: int, offset: int, kind, vector):
        one = load_at(self._builder, address, self._weights.form.row_bytes * row + offset, kind)
        return spread(self._builder, one, vector)


def in_sections(form: Form, rows: int, few: int, section: int) -> tuple[Any, int]:
    """Return a part of kernels that adds the products of groups of rows and a panel, and how many bytes it lays.

    Up to `few` groups are multiplied as blocks are stored, more groups by sections of at most so many blocks.
    """
    multiply_stored, multiply_laid = multiplying_stored(form, rows, lambda _: AHEAD_BYTES), multiplying_laid(form, rows)
    multiply_and_lay = multiplying_stored(form, rows, lambda _: 0, lays=True)
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
