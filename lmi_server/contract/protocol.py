"""The messages between the front end and a worker. Nothing else crosses the link.

On the wire each message is a 4-byte big-endian length and that many bytes of msgpack (see `contract.link`). Fields are
positional (`array_like`), after a tag that names the class. The front end chooses the ids, unique per worker process.

    front end -> worker   Load (once, first), Submit, Cancel, Hold, Recall, Waiting, Control, SetLogLevel, Shutdown
    worker -> front end   Ready or Failed (once), Frames, Stats, Leaving (at most once)

For every Submit the worker sends exactly one terminal item: Reply, End or Error. A streamed answer is Head, Chunk*,
End; an Error may replace the Head or follow it. Nothing follows a terminal item.

The worker also answers a Submit that the front end cancelled, with an Error of the kind "Cancelled". Only then does the
front end count the place of the request as free: until then the engine may still compute it. A request that was
recalled before the handler began it ends with an Error of the kind "Recalled".

A Submit that is `ahead` has no place yet: it waits in the engine's queue, where the engine's policy sees it. The worker
sends Begun once it has a place, before anything else of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError, error_from_kind
from lmi_server.contract.progress import Progress

DEFAULT_PRIORITY = 3

LOG_OFF = "OFF"
"""A log level above those of Python's logging, as LMI's logger has one; every process of the server knows it."""
logging.addLevelName(logging.CRITICAL + 10, LOG_OFF)


class Input(msgspec.Struct, array_like=True, frozen=True):
    """A request as the front end received it. The front end does not look into the body.

    `route` is one of those in `lmi_server/dialects/routes.py`: "invocations", "chat/completions", ... `properties` are
    the HTTP headers (lower-cased names), with `X-Amzn-SageMaker-Custom-Attributes` exploded into entries of its own.
    `content` holds the query parameters, then the body under the key "data". `request_id` is the client's or a new one;
    logs name the request by it. `priority`: lower is served sooner. Both also remain in `properties` if the client sent
    them as headers, because users' code reads them there. `names` has the names of `properties` as the client wrote
    them, one per line. `custom_attributes` is the header that was exploded, as it came.
    """

    route: str
    properties: dict[str, str]
    content: list[tuple[str, bytes]]
    request_id: str = ""
    priority: int = DEFAULT_PRIORITY
    names: str = ""
    custom_attributes: str = ""

    def body(self) -> bytes:
        """Return the bytes under the last "data" (a query may have the same key), or the first entry, or nothing."""
        for key, value in reversed(self.content):
            if key == "data":
                return value
        return self.content[0][1] if self.content else b""

    @property
    def keeps_chunks(self) -> bool:
        """True if each chunk of a stream arrives as it was sent; otherwise ready chunks go together."""
        return self.properties.get(SYNCHRONOUS_HEADER, "").lower() == "false"


SYNCHRONOUS_HEADER = "x-synchronous"
"""DJL Serving's header: if it is "false", the answer is kept and read later, in pages of the chunks that were sent."""

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
"""SageMaker's header of `name=value` pairs, which are properties of their own."""

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
"""SageMaker's header that names the LoRA adapter of a request; it goes before every other place."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter: `directory` holds its files on this machine, as peft writes them.

    `preload`: load the weights before the first request. `pin`: keep them in memory, whatever else needs the room.
    `alias` is the name that messages to users show; if it is empty, they show `name`. `options` are further parameters
    of the registration, which a model.py may read.
    """

    name: str
    directory: str
    preload: bool = True
    pin: bool = False
    alias: str = ""
    options: Mapping[str, str] = {}


# Without field names the message of a token is hardly longer than its text, and faster to decode. Both ends are always
# of the same version, so no field has to be found by name.
class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of everything on the link."""


class Load(Message, frozen=True):
    """Load a model: `handler` is "module:Class", `options_type` that of its options.

    `options` holds the validated values by field name, `passed_through` texts by key without "option.". `batch_size` is
    the number of requests that a RequestHandler gets at once, at most, `memory_limit_mb` the MiB that its process may
    have (0: any). `log_levels` are those of single loggers.
    """

    model_name: str
    model_dir: str
    handler: str
    options: dict[str, Any]
    served_names: list[str]
    log_level: str = "INFO"
    batch_size: int = 1
    memory_limit_mb: int = 0
    options_type: str = "lmi_server.configuration.options:ModelOptions"
    passed_through: dict[str, str] = {}
    log_levels: dict[str, str] = {}


class Submit(Message, frozen=True):
    """Serve one request. If `more` is set, the next Submit belongs to the same batch.

    `ahead`: every place of the worker was taken when it was sent.
    """

    id: int
    input: Input
    more: bool = False
    ahead: bool = False


class Cancel(Message, frozen=True):
    """Drop a request whose client went away."""

    id: int


class Hold(Message, frozen=True):
    """Stop a stream whose client reads too slowly, or let it go on."""

    id: int
    held: bool


class Recall(Message, frozen=True):
    """Give a request back for another worker, unless the handler has begun it."""

    id: int


class Waiting(Message, frozen=True):
    """How many requests of the model wait in the front end and in no worker. It is for statistics alone."""

    requests: int


class _Command(msgspec.Struct, array_like=True, frozen=True):
    """Base of what a Control asks of the model; `operation` is the name that messages to users show."""

    @property
    def operation(self) -> str:
        return str(self.__struct_config__.tag)


class AddAdapter(_Command, frozen=True, tag="add_adapter"):
    """Add a LoRA adapter, or replace the one of the same name. The answer is the handler's message, often empty."""

    adapter: Adapter


class RemoveAdapter(_Command, frozen=True, tag="remove_adapter"):
    """Remove a LoRA adapter; requests that run with it finish. The answer is the handler's message, often empty."""

    name: str


class GetMetrics(_Command, frozen=True, tag="metrics"):
    """Get the engine's own metrics in Prometheus' text format; empty if it has none."""


class Sleep(_Command, frozen=True, tag="sleep"):
    """Give back the memory that no weights take, and move weights from devices to the host. No request runs."""


class WakeUp(_Command, frozen=True, tag="wake_up"):
    """Undo a Sleep; nothing happens without one."""


class ResetPrefixCache(_Command, frozen=True, tag="reset_prefix_cache"):
    """Forget the computed prefixes of prompts. The data of the answer is b"true", or b"false" if some stay.

    With `running` also the prefixes of running requests, with `external` also what a connector keeps elsewhere.
    """

    running: bool
    external: bool


Command = AddAdapter | RemoveAdapter | GetMetrics | Sleep | WakeUp | ResetPrefixCache


class Control(Message, frozen=True):
    """A command for the model itself. The worker answers with one Reply or Error under the same id.

    The ids are negative, unlike those of requests.
    """

    id: int
    command: Command


class SetLogLevel(Message, frozen=True):
    """Set a log level of the worker, a name of Python's logging: the level of `logger`, "" for loggers without one.

    There is no answer.
    """

    level: str
    logger: str = ""


class Shutdown(Message, frozen=True):
    """Finish what runs within `deadline_s` seconds, then exit."""

    deadline_s: float


class Ready(Message, frozen=True):
    """The model is loaded.

    `max_model_len` is in tokens, 0 if the model does not generate text; `details` go into the log. `batch_size` is the
    number of requests that the handler gets at once, one batch after the other; None if it serves them concurrently.
    `window` is the number of waiting requests that a concurrent handler gets ahead, beside its running ones.
    """

    max_model_len: int
    details: dict[str, Any]
    batch_size: int | None = None
    window: int = 0


class Failed(Message, frozen=True):
    """The model could not be loaded, and the worker exits. `kind` is as in Error."""

    kind: str
    message: str


class Summary(msgspec.Struct, array_like=True, frozen=True):
    """The cost of generating the text of one answer, which only its worker knows.

    Times are in seconds from the moment at which the worker got the request: `prefill_s` to its first token,
    `generate_s` to its last one. `decode_s` is the time from the first to the last token, summed over all `sequences`.
    If an engine returned the whole output at once, `prefill_s` is None. `finish_reason` is the last sequence's.
    """

    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    sequences: int
    prefill_s: float | None
    generate_s: float
    decode_s: float
    adapter: str = ""


class Head(Message, frozen=True):
    """Status, headers and reason phrase of a streamed answer; without a phrase it is that of the status."""

    id: int
    status: int
    headers: list[tuple[str, str]]
    reason: str = ""


class Chunk(Message, frozen=True):
    """Bytes of a streamed answer."""

    id: int
    data: bytes


class End(Message, frozen=True):
    """The streamed answer is complete.

    `status` is 200, or the one of the error in its last bytes; `message` is the text of that error. An answer
    whose text was generated here has a `summary`.
    """

    id: int
    status: int = 200
    message: str = ""
    summary: Summary | None = None


CANCELLED = "Cancelled"
"""The kind of the Error that ends a request whose client went away."""

RECALLED = "Recalled"
"""The kind of the Error with which a worker gives back a request that it has not begun."""


class Error(Message, frozen=True):
    """The request failed; `kind` names a class of `lmi_server.contract.errors`, or is "Cancelled" or "Recalled".

    `code` is that of a HandlerError. `retry_after` is in seconds; None if it is that of the class.
    """

    id: int
    kind: str
    message: str
    code: int | None = None
    retry_after: int | None = None

    def exception(self) -> LmiServerError:
        """Return the exception that this stands for."""
        error = error_from_kind(self.kind, self.message, self.code)
        if self.retry_after is not None:
            error.retry_after = self.retry_after
        return error


class Reply(Message, frozen=True):
    """A whole answer in one item: status, headers, body and, as in Head, the reason phrase.

    `message` is the text of the error that the body reports, if the server itself wrote it. `summary` is as in End.
    """

    id: int
    status: int
    headers: list[tuple[str, str]]
    data: bytes
    reason: str = ""
    message: str = ""
    summary: Summary | None = None


class Begun(Message, frozen=True):
    """A request that was submitted ahead has a place now."""

    id: int


Item = Head | Chunk | End | Error | Reply
Frame = Item | Begun


class Frames(Message, frozen=True):
    """What one turn of the worker's loop produced for all requests. The order matters within a request only."""

    items: list[Frame]


class Stats(Message, frozen=True):
    """The heartbeat, sent once a second. Without it the front end takes the worker for hanging and kills it.

    `gauges` go into /metrics by their names. `progressed` are the ids of the requests for which the handler yielded
    something since the last Stats: of an answer that does not stream, the front end sees nothing else before its end.
    `loading` says how far the load of the model is, until it is loaded.
    """

    gauges: dict[str, float]
    progressed: list[int] = []
    loading: Progress | None = None


class Leaving(Message, frozen=True):
    """The worker takes no more requests: it gives back new requests, finishes the others, and closes the link.

    The front end answers with Shutdown, behind the last request that it sent; only then may the link be closed.
    Only workers that others than the front end may end send it: the replicas of a cluster.
    """


ToWorker = Load | Submit | Cancel | Hold | Recall | Waiting | Control | SetLogLevel | Shutdown
FromWorker = Ready | Failed | Frames | Stats | Leaving
