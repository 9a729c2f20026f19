"""Runs pieces of code, one after the other in one process, so that what they import is imported once.

Standard input is a JSON object of names and code. The last line of standard output is one of names and pairs: what the
code printed, or null if it failed, and its traceback. For tests only.
"""

import contextlib
import io
import json
import sys
import traceback


def outcome_of(code: str) -> tuple[str | None, str]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "script", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001 - also what a script ends with
        return None, traceback.format_exc()
    return printed.getvalue(), ""


if __name__ == "__main__":
    scripts = json.load(sys.stdin)
    print(json.dumps({name: outcome_of(code) for name, code in scripts.items()}))
