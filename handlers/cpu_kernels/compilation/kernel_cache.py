"""Where numba keeps compiled kernels, if it cannot write where it would: a read-only root has no such place.

Then they are kept in the directory for temporary files. What is compiled already, as in the container image, is copied
there, because numba reads and writes in one place only. If that cannot be written either, each process compiles its
kernels anew.
"""

# mypy: disable-error-code="no-untyped-call"
# numba has no types.

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba.core import config
from numba.core.caching import (
    CompileResultCacheImpl,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)

logger = logging.getLogger(__name__)

_LOCATORS = (UserProvidedCacheLocator, InTreeCacheLocator, UserWideCacheLocator)


def find_place(package: Path) -> bool:
    """Have a place for what is compiled of the modules below this folder; return whether there is one."""
    if _has_place(find_place):
        return True
    packages = sorted({module.parent for module in package.rglob("*.py")})
    sources = [next(filter(_has_kernels, _caches(folder)), None) for folder in packages]
    own = _temporary_folder()
    if own is None:
        logger.warning(
            "compiled kernels cannot be kept, so that each start takes longer by the time that it takes to compile "
            "them: make a directory that can be written, and name it by NUMBA_CACHE_DIR"
        )
        return False
    config.CACHE_DIR = str(own)
    for folder, source in zip(packages, sources, strict=True):
        if source is not None:
            _copy(source, next(_caches(folder)))
    first = next(filter(None, sources), None)
    copied = f" with those of {first}" if first else ""
    logger.info("Compiled kernels are kept in %s%s: no other place can be written", own, copied)
    return True


def _has_place(function: Callable[..., Any]) -> bool:
    try:
        CompileResultCacheImpl(function)
    except RuntimeError:  # "no locator available"
        return False
    return True


def _caches(package: Path) -> Iterator[Path]:
    """Yield where numba would look for what is compiled of the modules of this folder, the first place first."""
    wanted = [name.strip() for name in config.CACHE_LOCATOR_CLASSES.split(",") if name.strip()]
    for locator in (each for each in _LOCATORS if not wanted or each.__name__ in wanted):
        if locator is not UserProvidedCacheLocator or config.CACHE_DIR:
            yield Path(locator(find_place, str(package / "__init__.py")).get_cache_path())


def _has_kernels(folder: Path) -> bool:
    return next(folder.glob("*.nbi"), None) is not None


def _temporary_folder() -> Path | None:
    """Return a folder that only this user can write, None if there is none: numba runs the code that it finds there."""
    try:
        folder = Path(tempfile.gettempdir()) / f"lmi-server-kernels-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own else None


def _copy(source: Path, target: Path) -> None:
    """Copy the files that `target` lacks. Those with the code come first: an index names them."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.suffix == ".nbi"):
        if not (target / path.name).exists():
            with tempfile.NamedTemporaryFile(dir=target, delete=False) as file, path.open("rb") as original:
                shutil.copyfileobj(original, file)
            Path(file.name).replace(target / path.name)
