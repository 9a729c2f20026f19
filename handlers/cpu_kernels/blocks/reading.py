"""Finds a block of few bits in its panel (see layout.py), for code that is compiled for each kind."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.blocks.layout import Kind
from handlers.cpu_kernels.blocks.numbers import AHEAD_BYTES, HAS_TABLES, Numbers
from handlers.cpu_kernels.blocks.scales import Scales
from handlers.cpu_kernels.blocks.vectors import INT


class Block(NamedTuple):
    """A block, and what reads its parts."""

    kind: Kind
    scales: Scales
    numbers: Numbers


def is_read(kind: Kind) -> bool:
    """Whether layers have blocks of a kind on this processor."""
    if kind.has_output_scales:
        return amx.MULTIPLIES_BYTES
    return HAS_TABLES or not kind.has_codebook


def for_kind(builder, code, build, kinds: Sequence[Kind]) -> None:
    """Write `build(kind)` for each of some kinds; the one with `code` runs."""
    for kind in filter(is_read, kinds):
        with builder.if_then(builder.icmp_signed("==", code, INT(kind.code))):
            build(kind)


def block_at(builder, kind: Kind, panel, number, distance: int = AHEAD_BYTES) -> Block:
    """Return a block of the panel at an address, by its number, which is known at run time. `distance`: see Numbers."""
    before, inside = (getattr(builder, name)(number, INT(kind.blocks)) for name in ("udiv", "urem"))
    first = builder.add(panel, INT(kind.header_bytes))
    factors = builder.add(first, builder.mul(before, INT(kind.super_bytes)))
    behind = builder.add(INT(kind.factor_bytes), builder.mul(inside, INT(kind.block_bytes)))
    address = builder.add(factors, behind)
    numbers = Numbers(builder, kind, builder.add(address, INT(kind.numbers_at)), panel, distance)
    return Block(kind, Scales(builder, kind, factors, panel if kind.has_output_scales else address), numbers)
