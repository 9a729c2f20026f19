"""What is stored of a file and of a batch, and the objects that clients see."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from frontend.storage.objects import ObjectStore
from frontend.storage.owners import created_at, is_id, is_owner, new_id

logger = logging.getLogger(__name__)

FILE_PREFIX = "file-"
BATCH_PREFIX = "batch_"

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"
ENDED = frozenset({FAILED, COMPLETED, EXPIRED, CANCELLED})

_MAX_ERRORS = 100  # that a batch tells of

_ORPHAN_S = 86_400.0

_Record = TypeVar("_Record", bound=msgspec.Struct)


class FileRecord(msgspec.Struct):
    """One file. Times are in seconds since 1970; `expires_at` is None if it does not expire."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def as_object(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {"object": "file", **msgspec.to_builtins(self), "status": "processed", "status_details": None}

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


class LineFault(msgspec.Struct):
    """Why a line, or the file as a whole, is no input of a batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchCounts(msgspec.Struct):
    """The requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct):
    """One batch.

    The ids of the two files of its end are chosen with its own: so a server that ends while it writes them leaves
    nothing to the next one but to write them again. `output_lifetime_s` is None for that of all files. `lines` is how
    many lines the input has, 0 before they are counted.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    status: str = VALIDATING
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None
    faults: list[LineFault] = []
    counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
    lines: int = 0
    has_output: bool = False
    has_errors: bool = False
    times: dict[str, int] = {}

    def enter(self, status: str) -> None:
        """Note that the batch is in `status` from now on."""
        self.status = status
        self.times.setdefault(f"{status}_at", int(time.time()))

    def fail(self, faults: list[LineFault]) -> None:
        """End the batch, whose input cannot be used."""
        self.faults = faults[:_MAX_ERRORS]
        self.enter(FAILED)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def as_object(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        stamps = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": msgspec.to_builtins(self.faults)} if self.faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(f"{status}_at") for status in stamps},
            "request_counts": msgspec.to_builtins(self.counts),
            "metadata": self.metadata,
        }


def new_batch(endpoint: str, input_file_id: str, window: str, window_s: int) -> BatchRecord:
    """Return a batch that begins now and has `window_s` seconds."""
    now = int(time.time())
    ids = (new_id(FILE_PREFIX), new_id(FILE_PREFIX))
    return BatchRecord(new_id(BATCH_PREFIX), endpoint, input_file_id, window, now, now + window_s, *ids)


class UnreadableError(OSError):
    """What is stored is no record."""


class Cancellations:
    """Marks of batches whose servers are to end them. Every method may block; raises OSError."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def add(self, owner: str, batch_id: str) -> None:
        """Ask the server that runs a batch to end it."""
        self._store.put(_cancel_key(owner, batch_id), b"{}")

    def remove(self, owner: str, batch_id: str) -> None:
        self._store.remove(_cancel_key(owner, batch_id))

    def ids(self, owner: str) -> list[str]:
        return [entry.name for entry in self._store.entries(f"{owner}/cancels")]

    def includes(self, owner: str, batch_id: str) -> bool:
        return self._store.get(_cancel_key(owner, batch_id)) is not None


class OwnedRecords:
    """The files and batches in a store, each in the folder of its owner. Every method may block; raises OSError."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.cancellations = Cancellations(store)

    def owners(self) -> list[str]:
        return [folder for folder in self.store.folders() if is_owner(folder)]

    def save_file(self, owner: str, record: FileRecord) -> None:
        self.store.put(f"{owner}/files/{record.id}", msgspec.json.encode(record))

    def file(self, owner: str, file_id: str) -> FileRecord | None:
        """Return a file that has not expired, None if there is none of that id."""
        data = self.store.get(f"{owner}/files/{file_id}")
        record = None if data is None else _decode(data, FileRecord)
        return None if record is None or record.has_expired else record

    def file_ids(self, owner: str) -> list[str]:
        return self._ids(f"{owner}/files", FILE_PREFIX)

    def _ids(self, folder: str, prefix: str) -> list[str]:
        """Return the ids in a folder, in which a file system may have other names, too."""
        return [entry.name for entry in self.store.entries(folder) if is_id(prefix, entry.name)]

    def remove_file(self, owner: str, file_id: str) -> None:
        """Forget a file, first that there is one."""
        self.store.remove(f"{owner}/files/{file_id}")
        self.store.remove(content_key(owner, file_id))

    def remove_if_expired(self, owner: str, file_id: str, oldest: float) -> None:
        """Remove a file that has expired; one whose record cannot be read if it was made before `oldest`."""
        data = self.store.get(f"{owner}/files/{file_id}")
        try:
            has_expired = data is not None and _decode(data, FileRecord).has_expired
        except UnreadableError:
            if created_at(file_id) >= oldest:
                raise
            has_expired = True
        if has_expired:
            self.remove_file(owner, file_id)

    def remove_orphans(self, owner: str) -> None:
        """Remove contents without a record, which an upload has left that did not end."""
        newest = time.time() - _ORPHAN_S
        for entry in self.store.entries(f"{owner}/contents"):
            if created_at(entry.name) < newest and self.store.get(f"{owner}/files/{entry.name}") is None:
                self.store.remove(content_key(owner, entry.name))

    def sizes(self, owner: str) -> list[int]:
        """Return the bytes of each file of an owner."""
        return [entry.size for entry in self.store.entries(f"{owner}/contents")]

    def save_batch(self, owner: str, record: BatchRecord) -> None:
        self.store.put(f"{owner}/batches/{record.id}", msgspec.json.encode(record))

    def batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        data = self.store.get(f"{owner}/batches/{batch_id}")
        return None if data is None else _decode(data, BatchRecord)

    def batch_ids(self, owner: str) -> list[str]:
        return self._ids(f"{owner}/batches", BATCH_PREFIX)

    def remove_batch(self, owner: str, batch_id: str) -> None:
        self.store.remove(f"{owner}/batches/{batch_id}")

    def remove_oldest(self, owner: str, kept: int) -> int:
        """Forget batches that have ended, the oldest first, until `kept` or fewer are left; return how many."""
        ids = self.batch_ids(owner)
        surplus = len(ids) - kept
        if surplus <= 0:
            return 0
        unfinished = set(self.unfinished_ids(owner))
        ended = sorted(set(ids) - unfinished)[:surplus]
        for batch_id in ended:
            self.remove_batch(owner, batch_id)
        return len(ended)

    # An unfinished batch has an object in `unfinished`, so that to find them all no other one need be read.

    def begin_batch(self, owner: str, record: BatchRecord) -> None:
        """Save a new batch, its mark first: a sudden end in between leaves no batch that nothing runs or ends."""
        self.store.put(f"{owner}/unfinished/{record.id}", b"{}")
        self.save_batch(owner, record)

    def unfinished_ids(self, owner: str) -> list[str]:
        return [entry.name for entry in self.store.entries(f"{owner}/unfinished")]

    def end_batch(self, owner: str, record: BatchRecord) -> None:
        """Save the end of a batch, then remove what only an unfinished one has."""
        self.save_batch(owner, record)
        self.forget_unfinished(owner, record.id)

    def forget_unfinished(self, owner: str, batch_id: str) -> None:
        """Remove what only an unfinished batch has, the mark of it last."""
        self.store.remove_journal(journal_key(owner, batch_id))
        self.cancellations.remove(owner, batch_id)
        self.store.remove(f"{owner}/unfinished/{batch_id}")


def if_readable(load: Callable[[str], _Record | None]) -> Callable[[str], _Record | None]:
    """Return `load` for a list: what cannot be read is left out, and hides nothing else."""

    def load_readable(identity: str) -> _Record | None:
        try:
            return load(identity)
        except UnreadableError as error:
            logger.error("%s is left out of a list: %s", identity, error)
            return None

    return load_readable


def content_key(owner: str, file_id: str) -> str:
    return f"{owner}/contents/{file_id}"


def journal_key(owner: str, batch_id: str) -> str:
    return f"{owner}/journals/{batch_id}"


def _cancel_key(owner: str, batch_id: str) -> str:
    return f"{owner}/cancels/{batch_id}"


def _decode(data: bytes, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UnreadableError(f"what is stored is no {kind.__name__}: {error}") from error
