"""The messages from rank 0 of a group that serves batch after batch to the other ranks: msgpack, one per batch."""

from __future__ import annotations

import msgspec

from lmi_server.contract.protocol import Input


class Batch(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Run these requests. `seed` seeds torch for whatever a task draws without a seed of the request."""

    seed: int
    requests: list[Input]


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """End the loop of the other ranks."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Batch | Stop).decode
