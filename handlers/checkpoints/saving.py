"""Names option.save_mp_checkpoint_path in the error if a model cannot be written there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmi_server.contract.errors import ModelLoadError


@contextmanager
def saving(directory: str | Path) -> Iterator[None]:
    """Raise ModelLoadError for an OSError while files are written to option.save_mp_checkpoint_path, `directory`."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(
            f"option.save_mp_checkpoint_path={directory} cannot be written ({error}); name another directory"
        ) from error
