"""The JSON objects of answers, in the shapes of LMI and of text-generation-inference (TGI).

The order of the fields is the order on the wire. A field of value UNSET is left out.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.generation import FinishReason


class LmiToken(msgspec.Struct, omit_defaults=True):
    """A token as LMI writes it: `special_token` only if it is true."""

    id: int
    text: str
    log_prob: float | None
    special_token: bool = False


class TgiToken(msgspec.Struct):
    """A token as TGI writes it."""

    id: int
    text: str
    logprob: float | None
    special: bool


AnyToken = LmiToken | TgiToken


class PrefillToken(msgspec.Struct):
    """A prompt token as TGI writes it: without `special`."""

    id: int
    text: str
    logprob: float | None


class Details(msgspec.Struct):
    """What `parameters.details` asks for. `best_of_sequences` are the others, if several were generated."""

    finish_reason: FinishReason | None
    generated_tokens: int
    inputs: str | UnsetType = UNSET
    input_length: int | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    tokens: list[AnyToken] | UnsetType = UNSET
    prefill: list[AnyToken] | list[PrefillToken] | UnsetType = UNSET
    top_tokens: list[list[AnyToken]] | UnsetType = UNSET
    generated_text: str | UnsetType = UNSET  # of one of `best_of_sequences`
    best_of_sequences: list[Details] | UnsetType = UNSET
    note: str | UnsetType = UNSET


class WholeAnswer(msgspec.Struct):
    """An answer that is not streamed."""

    generated_text: str
    details: Details | UnsetType = UNSET


class Line(msgspec.Struct):
    """A line of a stream as LMI writes it: the last one has the whole text."""

    token: AnyToken
    generated_text: str | UnsetType = UNSET
    details: Details | UnsetType = UNSET


class TgiLine(msgspec.Struct):
    """A line of a stream as TGI writes it: every key on every line; `index` counts from 1."""

    index: int
    token: AnyToken
    top_tokens: list[AnyToken] | UnsetType
    generated_text: str | None = None
    details: Details | None = None


class AsyncToken(msgspec.Struct):
    """A token as LMI's asynchronous service writes it."""

    id: int
    text: str
    logprob: float | None


class AsyncDetails(msgspec.Struct):
    """The details of an answer of the asynchronous service that is not streamed."""

    finish_reason: str | None
    generated_tokens: int
    seed: int | None
    prefill: list[AsyncToken]
    tokens: list[AsyncToken]
    generated_text: str | UnsetType = UNSET  # of one of `best_of_sequences`
    best_of_sequences: list[AsyncDetails] | UnsetType = UNSET
    note: str | UnsetType = UNSET


class AsyncAnswer(msgspec.Struct):
    """An answer of the asynchronous service that is not streamed."""

    generated_text: str
    details: AsyncDetails | UnsetType = UNSET


class AsyncLineDetails(msgspec.Struct):
    """The details on the last line of a stream of the asynchronous service."""

    finish_reason: str | None
    seed: int | None
    generated_tokens: int
    input_length: int
    note: str | UnsetType = UNSET


class AsyncLine(msgspec.Struct):
    """A line of a stream of the asynchronous service: every key on every line; `index` counts the sequences."""

    index: int
    token: AsyncToken
    generated_text: str | None = None
    details: AsyncLineDetails | None = None
