"""Stateful sessions: values that user code keeps from one request to the next.

They are files that all workers of the machine share, and outlive a worker. Values are pickled, as in LMI. A pickle can
run code when it is read, so the directory of sessions belongs to the user of the server alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
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

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

NEW_SESSION = "NEW_SESSION"
DEFAULT_EXPIRATION_S = 1200

_EXPIRATION = ".expiration_ts"  # the key of the end of a session, in seconds since the epoch
_PICKLE_START = b"\x80"  # of every pickle since protocol 2
UUID_PATTERN = re.compile("[0-9a-f-]{36}")  # LMI's, which is wider than the ids that are made
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Session:
    """One session. `expiration_ts` is in seconds since the epoch; `files_path` is its directory in `session_root`.

    Keys are texts. A "/" in a key is replaced by "-", as in LMI.
    """

    def __init__(self, session_id: str, session_root: str | Path, expiration_ts: float | None = None) -> None:
        self.session_id = session_id
        self.files_path = os.path.join(session_root, session_id)
        self.expiration_ts: float = self.get(_EXPIRATION) if expiration_ts is None else expiration_ts

    def put(self, key: str, value: Any) -> None:
        """Store a value that pickle takes. Raises what pickle raises for any other."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        path = self._path(key)
        file, temporary = tempfile.mkstemp(prefix=".", dir=self.files_path)
        with os.fdopen(file, "wb") as written:
            written.write(data)
        os.replace(temporary, path)  # atomic: another worker reads the old value or the new one, never a part

    def get(self, key: str, d: Any = None) -> Any:
        """Return the value of `key`; `d` if there is none. Raises ValueError for an array of `get_as_numpy`."""
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return d
        if not data.startswith(_PICKLE_START):
            raise ValueError(f"put() did not store the value of {key}; read an array with get_as_numpy")
        return pickle.loads(data)  # the model's own code has stored it  # nosec B301

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

    def remove(self) -> bool:
        """Delete the session. Raises ValueError if it is deleted already."""
        try:
            shutil.rmtree(self.files_path)
        except FileNotFoundError:
            raise ValueError(f"session directory does not exist: {self.session_id}") from None
        return True

    def _path(self, key: str) -> Path:
        name = key.replace("/", "-")
        if name in ("", ".", "..") or "\0" in name:
            raise ValueError(f"key {key!r} is not allowed; use a text that names a file")
        return Path(self.files_path, name)


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
        if self.sessions_path.stat().st_mode & 0o022:
            logger.warning(
                "%s: others may write there, and so have this process run code; chmod 700", self.sessions_path
            )
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
            Session(session_id, unfinished, expiration_ts).put(_EXPIRATION, expiration_ts)
            made.rename(directory)  # atomic: no worker sees a session without its expiration
        return Session(session_id, self.sessions_path, expiration_ts)

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
        with contextlib.suppress(ValueError):  # another worker has deleted it meanwhile
            session.remove()
        if self._backup is not None:
            self._backup.forget(session.session_id)

    def _find(self, session_id: str) -> Session | None:
        # The id comes from a client's header and becomes a path: nothing like ../ may pass.
        if _SESSION_ID.fullmatch(session_id) is None:
            return None
        try:
            session = Session(session_id, self.sessions_path)
        except NotADirectoryError:
            return None
        return None if session.expiration_ts is None else session

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
    memory = Path("/dev/shm")  # LMI's place  # nosec B108
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / "djl_sessions"
