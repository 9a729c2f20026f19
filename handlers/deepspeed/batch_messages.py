"""What rank 0 of a group that serves whole tasks says to the others: plain data as msgpack, one message per batch."""

from __future__ import annotations

import msgspec

from lmi_server.contract.protocol import Input


class Batch(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Answer these requests; `seed` is for what is drawn at random without a seed of its own."""

    seed: int
    requests: list[Input]


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker ends."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Batch | Stop).decode
