"""Writes files whole or not at all, such as the reports of commands."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from lmi_server.contract.errors import ConfigurationError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file beside `path`, which takes the place of `path` when the block ends.

    Until then, and if it fails, `path` stays as it is. Raises ConfigurationError if the file cannot be written, as on a
    full disk. What is no regular file, such as /dev/stdout, is written directly.
    """
    target = path.resolve()
    is_direct = target.exists() and not target.is_file()
    file = target if is_direct else target.with_name(f".{target.name}.partial")
    try:
        with file.open("w", encoding="utf-8", newline="") as output:
            yield output
            output.flush()
            if not is_direct:
                os.fsync(output.fileno())
        if not is_direct:
            if target.exists():
                shutil.copymode(target, file)
            file.replace(target)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}; free space, or name another file"
        ) from error
    finally:
        if not is_direct:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text as the whole content of a file, as `replacing` does. Raises ConfigurationError."""
    with replacing(path) as output:
        output.write(text)
