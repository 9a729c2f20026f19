"""Every error that the server raises on purpose.

    LmiServerError
    ├── ConfigurationError      the model directory or its serving.properties cannot be used
    ├── ModelLoadError          the handler could not load the model
    │   ├── ArtifactError       the model's files could not be fetched, or are not what they should be
    │   └── ModelMemoryError    the model does not fit in the memory of host or device
    ├── RequestError            the request cannot be served as sent (the client's fault)
    │   ├── BadParameterError   a parameter of the path, the query or a management call
    │   ├── ModelExistsError    a model of that name and version is registered
    │   ├── AuthenticationError  the request has no API key, or a wrong one
    │   ├── PermissionDeniedError  this client may not do that
    │   ├── KeyBusyError        the API key has as many requests as it may have
    │   ├── DeadlineError       it was not done within the time that its headers allow
    │   ├── ContextLengthError  prompt and new tokens do not fit in the model's context
    │   ├── PayloadTooLargeError
    │   ├── QuarantinedError    it has ended its worker process twice
    │   ├── UnsupportedEncodingError
    │   ├── ModelNotFoundError
    │   ├── ObjectNotFoundError  no such file, batch or response of this API key
    │   ├── RouteNotFoundError
    │   ├── MalformedUrlError
    │   └── MethodNotAllowedError
    └── ServingError            a sound request that the server failed to serve
        ├── NoRoomError         the front end holds `max_buffered_size` bytes of requests
        ├── QueueFullError      the job queue holds `job_queue_size` requests
        │   └── QueueDelayError  the request would wait for longer than `max_queue_delay_ms`
        ├── ModelNotReadyError  loading, failed, or the server is draining
        ├── WorkerDiedError     the worker process ended while it held the request
        ├── AbortedError        a call to the management API has ended the request
        ├── UpstreamError       the server that had the request failed, behind this one
        ├── PredictTimeoutError the request made no progress for `predict_timeout`
        └── HandlerError        the handler raised

Between processes travel the `kind` (the class name) and the message, never a pickled exception. `error_from_kind` makes
an exception of this tree of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from lmi_server.contract.texts.quoting import one_line, sendable_message


class LmiServerError(Exception):
    """Base of the tree. `retry_after` is in seconds; None if a retry does not help.

    The message can always be sent: it has a longest length, and no lone surrogates.
    """

    retry_after: int | None = None

    def __init__(self, message: str) -> None:
        self.message = sendable_message(message)
        super().__init__(self.message)

    @property
    def kind(self) -> str:
        """The name under which this error travels between processes."""
        return type(self).__name__


class ConfigurationError(LmiServerError):
    """A setting that cannot be used; the message names file, line, key, value and what is allowed."""

    @classmethod
    def from_problems(cls, problems: Iterable[str]) -> Self:
        """Return the error whose message has a line for each problem, whatever the values in them hold."""
        return cls("\n".join(map(one_line, problems)))


class ModelLoadError(LmiServerError):
    """The handler could not load the model."""


class RollingBatchError(ModelLoadError):
    """The rolling batch of transformers does not serve the model; static batches may."""


class ModelMemoryError(ModelLoadError):
    """The model does not fit in the memory of the host or of its devices."""


class ArtifactError(ModelLoadError):
    """The model's files could not be fetched, or are not what they should be."""


class ArtifactMissingError(ArtifactError):
    """There is nothing at the place that the files should come from."""


class RequestError(LmiServerError):
    """The client must change the request before sending it again."""


class BadParameterError(RequestError):
    """A parameter that the front end itself reads is missing or cannot be used."""


class ModelExistsError(RequestError):
    """A model of that name and version is registered already."""


class AuthenticationError(RequestError):
    """The request has no API key, or one that is not accepted."""


class KeyBusyError(RequestError):
    """The API key has as many requests at a time as it may have."""

    retry_after = 1


class DeadlineError(RequestError):
    """The request was not done within the time that its headers allow."""


class PermissionDeniedError(RequestError):
    """The client may not do what it asks for."""


class ContextLengthError(RequestError):
    """Prompt and new tokens do not fit in the model's context.

    The counts are in tokens; a dialect may put them in words of its own. They are 0 if they are not known.
    """

    def __init__(self, message: str, prompt: int = 0, new: int = 0, limit: int = 0) -> None:
        """`new` is how many tokens the request asks for, `limit` how many the context holds."""
        super().__init__(message)
        self.prompt = prompt
        self.new = new
        self.limit = limit

    @classmethod
    def from_counts(cls, prompt: int, new: int, limit: int) -> ContextLengthError:
        """Return the error in OpenAI's words, by which clients recognise it and choose another model."""
        message = f"This model's maximum context length is {limit} tokens. However, "
        if prompt >= limit:
            message += f"the prompt has {prompt} tokens, which leaves no room for an answer. Please shorten the prompt."
        else:
            message += (
                f"you requested {prompt + new} tokens ({prompt} in the prompt, {new} in the completion)."
                f" Please shorten the prompt, or ask for {limit - prompt} new tokens at most."
            )
        return cls(message, prompt, new, limit)


class PayloadTooLargeError(RequestError):
    """The body is longer than `max_request_size`, or its media would take more than `max_media_size`."""


class QuarantinedError(RequestError):
    """The request has ended its worker process twice, and is refused for `quarantine_time` seconds."""


class UnsupportedEncodingError(RequestError):
    """The body has a Content-Encoding that the server does not decode."""


class ModelNotFoundError(RequestError):
    """No model of that name is served here."""


class ObjectNotFoundError(RequestError):
    """Nothing of that id is kept here for this API key."""


class RouteNotFoundError(RequestError):
    """No such path."""


class MalformedUrlError(RequestError):
    """A percent sign in the URL does not encode a byte."""


class MethodNotAllowedError(RequestError):
    """The path exists and does not take this HTTP method."""


class ServingError(LmiServerError):
    """A sound request that the server failed to serve."""


class NoRoomError(ServingError):
    """Bodies of requests, or answers that wait for their clients, take all the memory allowed to them together."""

    retry_after = 1


class QueueFullError(ServingError):
    """The job queue holds `job_queue_size` requests."""

    retry_after = 1


class QueueDelayError(QueueFullError):
    """The request would wait in the job queue for longer than `max_queue_delay_ms`."""


class ModelNotReadyError(ServingError):
    """The model is loading, has failed, or the server is draining."""

    retry_after = 5


class WorkerDiedError(ServingError):
    """The worker process ended while it held the request."""

    retry_after = 1


class AbortedError(ServingError):
    """A call to the management API has ended the request."""


class UpstreamError(ServingError):
    """The server that had the request ended, or answered what is no answer; it may have begun the request."""


class PredictTimeoutError(ServingError):
    """The request made no progress in its worker for `predict_timeout` seconds."""

    retry_after = 1


class HandlerError(ServingError):
    """The handler raised while serving the request, or reported an error.

    `code` is the status that the handler gave with it; None if it gave none.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def _subclasses(cls: type[LmiServerError]) -> list[type[LmiServerError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _subclasses(child))]


_BY_KIND = {cls.__name__: cls for cls in _subclasses(LmiServerError)}


def error_from_kind(kind: str, message: str, code: int | None = None) -> LmiServerError:
    """Return the exception that `kind` names; an unknown kind becomes a `HandlerError`, which alone has a `code`."""
    cls = _BY_KIND.get(kind, HandlerError)
    return HandlerError(message, code) if cls is HandlerError else cls(message)


EXITS = (SystemExit, KeyboardInterrupt)
"""What code raises to end its process, as `sys.exit` does. Any other exception only fails the call that raised it, also
one that does not derive from Exception: GeneratorExit, or what PyO3 raises when Rust panics."""


def message_of(error: object) -> str:
    """Return `str(error)`; "" if that raises, because the report of a failure must not fail itself."""
    try:
        return str.__str__(str(error))  # a plain one, of what may be a class of the user
    except BaseException:  # noqa: BLE001 - an exception of the user's code may have any `__str__`
        return ""


MAX_CAUSES = 50
"""How many exceptions are looked at, each the cause of the one before: user's code may make a chain of any length."""


def cause_of(error: BaseException) -> BaseException | None:
    """Return what the exception was raised from, whatever a class of the user has in place of `__cause__`."""
    cause: BaseException | None = BaseException.__dict__["__cause__"].__get__(error)
    return cause


def context_of(error: BaseException) -> BaseException | None:
    """Return what was handled when the exception was raised; None if that is not to be shown."""
    slots = BaseException.__dict__
    suppressed = slots["__suppress_context__"].__get__(error)
    context: BaseException | None = None if suppressed else slots["__context__"].__get__(error)
    return context


def describe(error: BaseException) -> str:
    """Return "Class: message", or the class alone if there is no message."""
    message = message_of(error).strip()  # transformers' about missing packages begin with an empty line
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return "Class: message" without what follows the first line: CUDA's messages end in advice for its developers."""
    return describe(error).partition("\n")[0]


def exit_message(error: BaseException) -> str:
    """Return the report of a request, or a load, that ended because the handler raised one of `EXITS`."""
    return f"The handler ended its process: {type(error).__name__}({message_of(error)})"


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into a ModelLoadError that names the extra to install. `what` is like "images need"."""
    try:
        yield
    except ImportError as error:
        raise ModelLoadError(f"{what} the extra '{extra}' ({error}); install lmi-server[{extra}]") from error


# What engines raise when memory runs out, besides MemoryError. torch's class is known by its name, so that torch need
# not be imported; the texts come from CUDA, vLLM, and torch on the host.
_OUT_OF_MEMORY_CLASS = "OutOfMemoryError"
_SEARCHED = 2**20  # characters of a message, which user's code may make of any length
_OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "No available memory for the cache blocks",
    "can't allocate memory",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error`, or one of its causes, is an out-of-memory error (host or device)."""
    for _ in range(MAX_CAUSES):  # user's code may raise an error from itself
        if error is None:
            break
        kind = type(error)  # isinstance would ask for `__class__`, which a class of the user may have, too
        if issubclass(kind, MemoryError) or kind.__name__ == _OUT_OF_MEMORY_CLASS:
            return True
        message = message_of(error)[:_SEARCHED]
        if any(text in message for text in _OUT_OF_MEMORY_TEXTS):
            return True
        error = cause_of(error)
    return False


def failure_of(error: BaseException, message: str | None = None) -> ServingError | ModelMemoryError:
    """Return the error of a request that `error` ended; its message is `message`, or else what `error` says."""
    text = describe(error) if message is None else message
    return ModelMemoryError(text) if is_out_of_memory(error) else HandlerError(text)


# torch's class is known by its name again. Older versions, and libraries of the driver, raise RuntimeError.
_DEVICE_FAILED_CLASS = "AcceleratorError"
_DEVICE_FAILED_TEXTS = ("CUDA error: ", "HIP error: ", "CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR")


def is_device_failure(error: BaseException) -> bool:
    """Return whether a GPU has failed under this process, so that each later call fails."""
    if is_out_of_memory(error):
        return False
    return type(error).__name__ == _DEVICE_FAILED_CLASS or any(
        text in message_of(error) for text in _DEVICE_FAILED_TEXTS
    )
