"""The program that unpacks one archive, with bounded memory and processor time:

    python -m lmi_server.artifacts.unpacking ARCHIVE TARGET LIMITS PROGRESS

LIMITS is ArchiveLimits as a JSON object. PROGRESS is an inherited descriptor; a line with the place in the archive
is added to it now and then. If the archive is refused, a JSON object on standard output says why: `message`, or the
`errno` of an error of the file system.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from lmi_server.artifacts.unpacking.limits import ArchiveLimits
from lmi_server.artifacts.unpacking.unpack import unpack
from lmi_server.contract.errors import ArtifactError
from lmi_server.contract.texts.sizes import in_words


def main() -> None:
    archive, target = map(Path, sys.argv[1:3])
    limits = ArchiveLimits(**json.loads(sys.argv[3]))
    progress = int(sys.argv[4])
    _bound(resource.RLIMIT_AS, _address_space() + limits.memory)
    _bound(resource.RLIMIT_CPU, limits.processor_seconds(archive.stat().st_size), spare=1)  # at SIGXCPU, not SIGKILL
    _bound(resource.RLIMIT_CORE, 0)
    try:
        unpack(archive, target, limits, lambda done: _report(progress, done))
    except ArtifactError as error:
        _fail(message=error.message)
    except MemoryError:
        _fail(message=f"needs more than {in_words(limits.memory)} of memory to be unpacked; it is refused as a bomb")
    except OSError as error:
        if error.filename == str(archive):
            _fail(message=f"cannot be read: {error.strerror}")
        else:
            _fail(errno=error.errno)  # without the name, which is the archive's


def _bound(kind: int, limit: int, spare: int = 0) -> None:
    """Set the soft limit to `limit`, and the hard one `spare` above it; neither is raised."""
    _, hard = resource.getrlimit(kind)
    ceiling = limit + spare if hard == resource.RLIM_INFINITY else min(limit + spare, hard)
    resource.setrlimit(kind, (min(limit, ceiling), ceiling))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _report(progress: int, done: int) -> None:
    os.write(progress, b"%d\n" % done)


def _fail(**problem: Any) -> None:
    print(json.dumps(problem))


if __name__ == "__main__":
    main()
