"""Reads scales and minima of blocks of few bits (see layout.py) as float32."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir

from handlers.cpu_kernels.blocks.layout import OUTPUTS, Kind
from handlers.cpu_kernels.blocks.vectors import BYTE, FLOAT, INT, QUARTERS, WORD, load_at, shuffled
from handlers.cpu_kernels.intrinsics import LANES

_OF_QUARTER = OUTPUTS // QUARTERS
_BYTES, _HALVES = ir.VectorType(BYTE, _OF_QUARTER), ir.VectorType(ir.HalfType(), _OF_QUARTER)
_WORDS, _FLOATS = ir.VectorType(WORD, _OF_QUARTER), ir.VectorType(FLOAT, _OF_QUARTER)


class Scales:
    """The scales and minima of a block at an address, whose factors, if it has any, are at another."""

    def __init__(self, builder, kind: Kind, factors, address) -> None:
        self._builder, self._kind, self._factors, self._address = builder, kind, factors, address

    def of_quarter(self, quarter: int, group) -> ir.Value:
        """Return the scales of a quarter, each twice; `group` is a number that is known at run time."""
        return self._twice(self._scales(self._of_group(group), quarter))

    def of_half(self, half: int, group) -> ir.Value:
        """Return the scales of half the outputs; `group` is a number that is known at run time."""
        begin = self._of_group(group)
        return self._joined(self._scales(begin, quarter) for quarter in (2 * half, 2 * half + 1))

    def _of_group(self, group):
        if self._kind.scales == 1:
            return self._address
        return self._builder.add(self._address, self._builder.mul(group, INT(OUTPUTS * self._kind.scale_bytes)))

    def minima_of_quarter(self, quarter: int) -> ir.Value:
        """Return the minima of a quarter, each twice, with the sign changed."""
        return self._builder.fneg(self._twice(self._minima(quarter)))

    def minima_of_half(self, half: int) -> ir.Value:
        """Return the minima of half the outputs."""
        return self._joined(map(self._minima, (2 * half, 2 * half + 1)))

    def _scales(self, address, quarter: int):
        """Return the scales of a quarter at an address: times their factors if there are any."""
        if self._kind.scale_bytes == 4:
            return load_at(self._builder, address, 4 * _OF_QUARTER * quarter, _FLOATS)
        if not self._kind.has_factors:
            return self._halves(address, quarter)
        return self._multiplied(address, self._factors, quarter)

    def _minima(self, quarter: int):
        address = self._builder.add(self._address, INT(OUTPUTS * self._kind.scale_bytes * self._kind.scales))
        factors = self._address if self._kind.has_zeros else self._builder.add(self._factors, INT(2 * OUTPUTS))
        if self._kind.minimum_bytes == 1:
            return self._multiplied(address, factors, quarter)
        return self._halves(address, quarter)

    def _multiplied(self, address, factors, quarter: int):
        """Return the bytes of a quarter at an address, times the float16 at `factors`."""
        builder = self._builder
        small = load_at(builder, address, _OF_QUARTER * quarter, _BYTES)
        widen = builder.zext if self._kind.has_minimum else builder.sext
        return builder.fmul(builder.sitofp(widen(small, _WORDS), _FLOATS), self._halves(factors, quarter))

    def _halves(self, address, quarter: int):
        return self._builder.fpext(load_at(self._builder, address, 2 * _OF_QUARTER * quarter, _HALVES), _FLOATS)

    def _joined(self, quarters):
        one, other = quarters
        return shuffled(self._builder, one, other, range(LANES))

    def _twice(self, vector):
        return shuffled(self._builder, vector, vector, [lane // 2 for lane in range(LANES)])
