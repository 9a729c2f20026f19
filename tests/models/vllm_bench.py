"""`vllm bench serve` for a vLLM whose package is not named vllm: vLLM's own command fails to find its version.

Without arguments, each line of standard input is a run, as a JSON list of arguments: importing vLLM takes longer than
the runs.
"""

from __future__ import annotations

import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    runs = [sys.argv[1:]] if len(sys.argv) > 1 else map(json.loads, sys.stdin)
    for arguments in runs:
        main(parser.parse_args(arguments))
