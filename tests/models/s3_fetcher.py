"""`python s3_fetcher.py URL ROOT CUT LIMIT`: a fetch with boto3 that may be cut. For tests only.

CUT kills the process once so many bytes are here (0: never); LIMIT is the longest file that it may write (0: any).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from lmi_server.artifacts.location import S3Location
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.s3.clients import Boto3
from lmi_server.artifacts.s3.mirror import fetch_s3
from lmi_server.contract.errors import ArtifactError
from lmi_server.contract.progress import Progress


def main(url: str, root: str, cut: int, limit: int) -> int:
    def on_progress(progress: Progress) -> None:
        if cut and progress.done >= cut and progress.what.startswith("downloading"):
            os.kill(os.getpid(), signal.SIGKILL)

    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    try:
        fetch_s3(Boto3(os.environ, S3Location(bucket, prefix)), Path(root), 0, Activity(on_progress))
    except ArtifactError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
