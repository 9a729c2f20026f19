"""What is stored of a response, and the store of all."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from frontend.storage.objects import ObjectStore
from frontend.storage.owners import created_at, is_owner
from frontend.stored_responses.settings import ResponseSettings

PREFIX = "resp_"
EMPTY = b"[]"
RUNNING = ("queued", "in_progress")

_TRIMMED_EVERY = 100  # responses of an owner: looking at all of them takes time


class StoredResponse(msgspec.Struct):
    """One response: the object that clients see, and the list of the items of its own input, as the client sent it.

    `process` names the process that makes it, if it is made in the background.
    """

    response: dict[str, Any]
    input: msgspec.Raw = msgspec.Raw(EMPTY)
    process: str = ""

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def previous(self) -> str | None:
        found = self.response.get("previous_response_id")
        return found if isinstance(found, str) else None

    @property
    def is_running(self) -> bool:
        return self.response.get("status") in RUNNING

    @property
    def output(self) -> list[Any]:
        items = self.response.get("output")
        return items if isinstance(items, list) else []


class ResponseStore:
    """The responses of all API keys, each in the folder of its owner. Every method may block; raises OSError."""

    def __init__(self, store: ObjectStore, settings: ResponseSettings) -> None:
        self._store = store
        self._settings = settings
        self._saved: dict[str, int] = {}  # by owner, since its responses were looked at

    def save(self, owner: str, record: StoredResponse) -> None:
        """Keep a response; the oldest ones of the owner go if there are too many."""
        self._store.put(self._key(owner, record.id), msgspec.json.encode(record))
        count = self._saved.get(owner, _TRIMMED_EVERY - 1) + 1
        self._saved[owner] = count % _TRIMMED_EVERY
        if count >= min(_TRIMMED_EVERY, self._settings.responses_max_count):
            self._trim(owner)

    def load(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if there is none of that id, or if its time is over."""
        if created_at(response_id) < self._oldest:
            return None
        data = self._store.get(self._key(owner, response_id))
        try:
            return None if data is None else msgspec.json.decode(data, type=StoredResponse)
        except msgspec.DecodeError as error:
            raise OSError(f"what is stored is no response: {error}") from error

    def remove(self, owner: str, response_id: str) -> None:
        self._store.remove(self._key(owner, response_id))

    def sweep(self) -> None:
        """Remove the responses whose time is over. Other folders of the place are not this store's."""
        for owner in filter(is_owner, self._store.folders()):
            self._trim(owner)

    def _trim(self, owner: str) -> None:
        entries = self._store.entries(f"{owner}/responses")  # the oldest first
        count, size = len(entries), sum(entry.size for entry in entries)
        for entry in entries:
            is_over = created_at(entry.name) < self._oldest
            if (
                not is_over
                and count <= self._settings.responses_max_count
                and size <= self._settings.responses_max_size
            ):
                return
            self.remove(owner, entry.name)
            count, size = count - 1, size - entry.size

    @property
    def _oldest(self) -> float:
        return time.time() - self._settings.responses_lifetime

    def _key(self, owner: str, response_id: str) -> str:
        return f"{owner}/responses/{response_id}"
