"""Gives the tests that failed in the last run of pytest a second try, alone: `python -m scripts.retry_failed`.

Whatever else runs on the machine can make a server of a test too late, so a second try is fair to the person who waits
for it. A test that passes only then is flaky all the same, and to be mended: each is printed as `flaky: NAME`. With
`--strict` a flaky test ends this with 1 unless `tests/flaky.txt` names it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = "tests/flaky.txt"
_LAST_FAILED = ".pytest_cache/v/cache/lastfailed"
_PYTEST = ("-m", "pytest", "-v", "--maxfail", "1", "--last-failed", "--last-failed-no-failures", "none")


def read_list(text: str) -> dict[str, str]:
    """Return the reason of each listed test: lines `NAME  # REASON`, and comments.

    Raises ValueError for a line without a reason.
    """
    reasons = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, separator, reason = line.partition("  # ")
        if not separator or not reason.strip():
            raise ValueError(f"{LIST}: {line!r} has no reason; write `NAME  # REASON`")
        reasons[name] = reason.strip()
    return reasons


def failed(root: Path) -> set[str]:
    """Return the tests that pytest's cache has as failed; none if there is no cache."""
    cache = root / _LAST_FAILED
    return set(json.loads(cache.read_text(encoding="utf-8"))) if cache.exists() else set()


def report(flaky: Iterable[str], listed: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return a line for each flaky test, and whether all of them are listed."""
    names = sorted(flaky)
    lines = [f"flaky: {name}" + (f" ({listed[name]})" if name in listed else "") for name in names]
    return lines, all(name in listed for name in names)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Try again what failed; return the exit code of pytest, or 1 for a flaky test that may not be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--strict", action="store_true", help=f"fail for a flaky test that {LIST} does not name")
    strict = parser.parse_args(arguments).strict
    listed = read_list((root / LIST).read_text(encoding="utf-8"))
    before = failed(root)
    print("What failed is tried again, alone:", flush=True)
    code = subprocess.run([sys.executable, *_PYTEST], cwd=root, check=False).returncode
    lines, are_listed = report(before - failed(root), listed)
    print(*lines, sep="\n", flush=True)
    if code == 0 and strict and not are_listed:
        print(f"A test is flaky: mend it, or name it in {LIST} with the reason why it cannot be mended.", flush=True)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
