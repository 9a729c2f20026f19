"""What rank 0 says to the other ranks of its group: plain data as msgpack, one message per step."""

from __future__ import annotations

import msgspec

from handlers.rolling_batch.attention import ChunkRows
from handlers.rolling_batch.slots import Copy, Trim


class Pass(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """One step: do `trims`, then `copies`, then compute the rows; the fields are those of StepRows.

    A copy that a chunk has as its source is done after the step, before anything else of the next one.

    Row i of the pass is `token_ids[i]` at `positions[i]`; the first rows belong to `slots`, the next to `chunks`, and
    the last, if there are more, to nobody. `keep` are the rows whose logits are wanted, which may be filled up, too.
    The tokens that were sampled in one step are rows of the next, so that nobody but rank 0 samples.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    chunks: list[ChunkRows]
    keep: list[int]
    trims: list[Trim]
    copies: list[Copy]


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Allocate a KV cache of `slots` slots of `max_len` tokens."""

    slots: int
    max_len: int


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker ends."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Pass | Prepare | Stop).decode
