"""`python -m benchmarks.command_starts`: seconds of a processor until `lmi-server` runs a command, in fresh processes.

In turns, with commands that are imported once they are called (lmi_server/commands/late_commands.py), and with all of
them imported at the start. Then the same for what the end of `lmi-server tune` imports of optuna, without scikit-learn
(lmi_server/tune/search.py) and with it.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from statistics import median

from benchmarks.figures import in_turns, parser_of

_VERSION = """
import sys, time
from lmi_server.commands import cli, start
if sys.argv.pop() == "at once":
    group = cli.typer.main.get_command(cli.app)
    commands = [group.commands[name] for name in group.commands]
sys.argv = ["lmi-server", "version"]
try:
    start.main()
except SystemExit:
    pass
print(time.process_time())
"""
_IMPORTANCE = """
import sys, time
import lmi_server.tune.search
from lmi_server.processes.model_imports import hide
began = time.process_time()
with hide("sklearn" if sys.argv.pop() == "late" else "no library"):
    from optuna.importance import PedAnovaImportanceEvaluator
print(time.process_time() - began)
"""


def _seconds(program: str, way: str) -> float:
    done = subprocess.run([sys.executable, "-c", program, way], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    for name, program in (("lmi-server version", _VERSION), ("the end of lmi-server tune", _IMPORTANCE)):
        found = in_turns(turns, {way: partial(_seconds, program, way) for way in ("late", "at once")})
        late, at_once = median(found["late"]), median(found["at once"])
        print(f"{name}: {late:.2f} s with late imports, {at_once:.2f} s with all at once")


if __name__ == "__main__":
    main()
