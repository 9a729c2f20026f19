"""Stateful sessions: values that user code keeps from one request to the next.

They are files that all workers of the machine share and that outlive a worker. Values are stored as msgpack and in
NumPy's own format, never pickled, so that reading a session runs no code.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from djl_python.optional_packages import needs
from djl_python.session_backup import SessionBackup
from djl_python.session_values import decode, encode

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

NEW_SESSION = "NEW_SESSION"
DEFAULT_EXPIRATION_S = 1200

_EXPIRATION = ".expiration"  # the file with the end of a session; no key begins with a dot
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Session:
    """One session. `expiration_ts` is in seconds since the epoch.

    Keys are texts. A "/" in a key is replaced by "-", as in LMI.
    """

    def __init__(self, session_id: str, directory: Path, expiration_ts: float) -> None:
        self.session_id = session_id
        self.expiration_ts = expiration_ts
        self._directory = directory

    @property
    def files_path(self) -> str:
        """Return the directory of the session."""
        return str(self._directory)

    def put(self, key: str, value: Any) -> None:
        """Store a value: None, bool, int, float, str, bytes, NumPy arrays and scalars, and list, tuple, dict of these.

        Raises TypeError naming the type of anything else.
        """
        data = encode(value)
        path = self._path(key)
        file, temporary = tempfile.mkstemp(prefix=".", dir=self._directory)
        with os.fdopen(file, "wb") as written:
            written.write(data)
        os.replace(temporary, path)  # atomic: another worker reads the old value or the new one, never a part

    def get(self, key: str, d: Any = None) -> Any:
        """Return the value of `key`; `d` if there is none. Raises ValueError for an array of `get_as_numpy`."""
        try:
            return decode(self._path(key).read_bytes())
        except FileNotFoundError:
            return d

    def get_as_numpy(
        self, key: str, shape: tuple[int, ...], dtype: Any = None, create: bool = False
    ) -> np.memmap[Any, np.dtype[Any]]:
        """Return an array whose memory is a file of the session, so that writing to it changes the session.

        `dtype` is float32 by default. Without `create`, raises ValueError if the array is missing or of another size.
        """
        with needs("numpy", "arrays of a session"):
            import numpy as np

        path, kind = self._path(key), np.dtype(np.float32 if dtype is None else dtype)
        if create:
            return np.memmap(path, kind, "w+", shape=shape)
        wanted = kind.itemsize * int(np.prod(shape))
        if not path.is_file():
            raise ValueError(f"session {self.session_id} has no array {key}; create it with create=True")
        if path.stat().st_size != wanted:
            raise ValueError(f"array {key} has {path.stat().st_size} bytes; {shape} of {kind} are {wanted}")
        return np.memmap(path, kind, "r+", shape=shape)

    def remove(self) -> None:
        """Delete the session."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, key: str) -> Path:
        name = key.replace("/", "-")
        if not name or name.startswith(".") or "\0" in name:
            raise ValueError(f"key {key!r} is not allowed; use a text that does not begin with a dot")
        return self._directory / name


class SessionManager:
    """The sessions in `sessions_path`; each expires `sessions_expiration` seconds after its creation.

    With `sessions_s3url`, a worker saves them there when it ends, and fetches a session that is not on this machine.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.expiration = float(properties.get("sessions_expiration") or DEFAULT_EXPIRATION_S)
        self.sessions_path = Path(properties.get("sessions_path") or _default_path())
        self.sessions_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.sessions_path.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.sessions_path} belongs to another user; set option.sessions_path")
        url = properties.get("sessions_s3url")
        self._backup = SessionBackup(url, self.sessions_path) if url else None
        if url:
            _saved.add(self)

    def create_session(self) -> Session:
        """Delete expired sessions, then return a new one."""
        self._clean_expired()
        session_id = str(uuid.uuid4())
        directory = self.sessions_path / session_id
        expiration_ts = time.time() + self.expiration
        with tempfile.TemporaryDirectory(prefix=".", dir=self.sessions_path) as unfinished:
            made = Path(unfinished, session_id)
            made.mkdir(mode=0o700)
            (made / _EXPIRATION).write_text(repr(expiration_ts))
            made.rename(directory)  # atomic: no worker sees a session without its expiration
        return Session(session_id, directory, expiration_ts)

    def get_session(self, session_id: str | None) -> Session | None:
        """Return a session; None for no id, for NEW_SESSION, and for a session that has expired.

        Raises ValueError if there is no such session.
        """
        if not session_id or session_id == NEW_SESSION:
            return None
        session = self._found(session_id)
        if session.expiration_ts <= time.time():
            self._remove(session)
            return None
        return session

    def close_session(self, session_id: str | None) -> None:
        """Delete a session. Raises ValueError without an id and for an unknown one."""
        if not session_id:
            raise ValueError(f"invalid session_id: {session_id!r}")
        self._remove(self._found(session_id))

    def save(self) -> None:
        """Save every session to `sessions_s3url`, if that is set. Raises OSError if S3 fails."""
        if self._backup is not None:
            self._backup.save([session.session_id for session in self._here() if session.expiration_ts > time.time()])

    def _found(self, session_id: str) -> Session:
        session = self._find(session_id)
        if session is None and self._backup is not None and _SESSION_ID.fullmatch(session_id):
            session = self._find(session_id) if self._backup.fetch(session_id) else None
        if session is None:
            raise ValueError(f"session not found: {session_id}")
        return session

    def _remove(self, session: Session) -> None:
        session.remove()
        if self._backup is not None:
            self._backup.forget(session.session_id)

    def _find(self, session_id: str) -> Session | None:
        if (
            _SESSION_ID.fullmatch(session_id) is None
        ):  # it comes from a client's header and becomes a path: nothing like ../ may pass
            return None
        directory = self.sessions_path / session_id
        try:
            return Session(session_id, directory, float((directory / _EXPIRATION).read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _clean_expired(self) -> None:
        for session in self._here():
            if session.expiration_ts <= time.time():
                self._remove(session)

    def _here(self) -> list[Session]:
        found = [self._find(directory.name) for directory in self.sessions_path.iterdir()]
        return [session for session in found if session is not None]


_saved: WeakSet[SessionManager] = WeakSet()


def save_sessions() -> None:
    """Save the sessions of every manager with a `sessions_s3url`. The worker calls it before it ends."""
    for manager in list(_saved):
        try:
            manager.save()
        except OSError:
            logger.exception("sessions could not be saved")


def _default_path() -> Path:
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / "djl_sessions"
