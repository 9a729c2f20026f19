"""`lmi-server ray ARGUMENTS...` in a fork that has imported Ray. For tests only.

What Ray does at the end of an interpreter, to leave its cluster in order, is done at the end of the fork.
"""

from __future__ import annotations

import atexit
import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["ray"]
    try:
        runpy.run_module("lmi_server", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
