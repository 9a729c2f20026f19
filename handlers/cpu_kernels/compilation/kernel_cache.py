"""Where compiled kernels are kept: a file for each combination of argument types, in the folder that numba chooses.

numba's own cache has an index of these combinations. Of two processes that write it at once one loses its entry, and a
damaged file ends the load. Here there is no index: the name of a file follows from what it holds, and a file that is
damaged, or that other users can have written, is compiled anew.

A read-only root has no such folder. Then they are kept in the directory for temporary files. What is compiled already,
as in the container image, is copied there, because kernels are read and written in one place only. If that cannot be
written either, each process compiles its kernels anew.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc"
# numba has no types.

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit
from numba.core import config, sigutils
from numba.core.caching import FunctionCache, InTreeCacheLocator, UserProvidedCacheLocator, UserWideCacheLocator
from numba.core.serialize import dumps

from handlers.cpu_kernels.compilation import kernel_files

logger = logging.getLogger(__name__)

_LOCATORS = (UserProvidedCacheLocator, InTreeCacheLocator, UserWideCacheLocator)
_SUFFIX = ".kernel"
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.version)


class KernelCache(FunctionCache):
    """What numba asks for the compiled code of a kernel."""

    def load_overload(self, sig, target_context):
        """Return the kernel for a signature; None if there is none, or none that is to be trusted."""
        target_context.refresh()
        identity = self._identity(sig, target_context.codegen())
        path = self._path(identity)
        try:
            code = kernel_files.verified(identity, kernel_files.read(path))
            return self._impl.rebuild(target_context, pickle.loads(code))
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = str(error)
        # The border to numba and pickle: nothing says what they raise.
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {error}"
        logger.warning("the kernel in %s is compiled anew: %s", path, reason)
        return None

    def save_overload(self, sig, data):
        """Keep a compiled kernel, unless it has addresses of this process in it: numba warns of such code."""
        if not self._impl.check_cachable(data):
            return
        identity = self._identity(sig, data.codegen)
        code = dumps(self._impl.reduce(data))
        path = self._path(identity)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kernel_files.write(path, kernel_files.signed(identity, code))
        except OSError as error:
            logger.warning("each start compiles the kernel that %s cannot keep: %s", path, error)

    def _identity(self, sig, codegen) -> str:
        """Return what the code follows from. The name of the function has digests of all sources and of the target."""
        arguments, _ = sigutils.normalize_signature(sig)
        return repr((self._impl.filename_base, _VERSIONS, self._index_key(arguments, codegen)))

    def _path(self, identity: str) -> Path:
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return Path(self.cache_path) / f"{self._impl.filename_base}-{digest}{_SUFFIX}"


def keep(kernel: Any) -> None:
    """Have the compiled code of a kernel, a dispatcher of numba, kept. Raises RuntimeError if there is no place."""
    kernel._cache = KernelCache(kernel.py_func)


def find_place(package: Path) -> bool:
    """Have a place for what is compiled of the modules below this folder; return whether there is one."""
    if _has_place():
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


def _has_place() -> bool:
    kernel = njit(find_place)
    try:
        keep(kernel)
    except RuntimeError:  # "no locator available"
        return False
    assert kernel.stats.cache_path is not None, "kernels have another cache"
    return True


def _caches(package: Path) -> Iterator[Path]:
    """Yield where numba would look for what is compiled of the modules of this folder, the first place first."""
    wanted = [name.strip() for name in config.CACHE_LOCATOR_CLASSES.split(",") if name.strip()]
    for locator in (each for each in _LOCATORS if not wanted or each.__name__ in wanted):
        if locator is not UserProvidedCacheLocator or config.CACHE_DIR:
            yield Path(locator(find_place, str(package / "__init__.py")).get_cache_path())


def _has_kernels(folder: Path) -> bool:
    return next(folder.glob(f"*{_SUFFIX}"), None) is not None


def _temporary_folder() -> Path | None:
    """Return a folder that only this user can write, None if there is none."""
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
    """Copy the files that `target` lacks, of those to be trusted: afterwards this user owns them."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix not in (".pyc", kernel_files.PARTIAL) and not (target / path.name).exists():
            try:
                kernel_files.write(target / path.name, kernel_files.read(path))
            except OSError as error:
                logger.warning("%s is not copied to %s: %s", path, target, error)
