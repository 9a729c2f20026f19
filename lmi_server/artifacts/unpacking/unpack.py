"""Unpacks an archive in this process; `__main__.py` does so with bounded memory and time."""

from __future__ import annotations

import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from lmi_server.artifacts.unpacking.limits import Allowance, ArchiveLimits
from lmi_server.artifacts.unpacking.tar_file import unpack_tar
from lmi_server.artifacts.unpacking.tree import Tree
from lmi_server.artifacts.unpacking.zip_file import unpack_zip
from lmi_server.contract.errors import ArtifactError
from lmi_server.contract.texts.quoting import excerpt

_ZIP_SUFFIXES = (".zip", ".mar")
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile, lzma.LZMAError, zlib.error),
    # Exceptions of the libraries for fields with values that their authors did not think of.
    *(EOFError, NotImplementedError, RecursionError, ValueError, OverflowError, LookupError, struct.error),
)


def unpack(archive: Path, target: Path, limits: ArchiveLimits, report: Callable[[int], None]) -> None:
    """Unpack `archive` (tar in any compression, or zip) into the empty directory `target`.

    Calls `report` with the place in the archive that it has reached. Raises ArtifactError if an entry is unsafe, or if
    the archive is damaged or over the limits; its message goes on after the archive's name. Raises OSError of the file
    system.
    """
    allowance = Allowance(limits, archive.stat().st_size, report)
    try:
        tree = Tree(target, allowance)
        # The content alone does not tell: is_zipfile looks at the end, and a tar may end with a zip file.
        if archive.name.lower().endswith(_ZIP_SUFFIXES) and zipfile.is_zipfile(archive):
            unpack_zip(archive, tree, allowance)
        else:
            unpack_tar(archive, tree, allowance)
        tree.check_links()
    except _DAMAGED as error:
        raise _damage_error(error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damage_error(error) from error  # gzip and bz2 derive their errors from OSError


def _damage_error(error: Exception) -> ArtifactError:
    reason = excerpt(str(error).partition("\n")[0].rstrip(":"))  # further lines say what each decompressor found
    return ArtifactError(f"is damaged, or is no tar or zip archive: {reason}")
