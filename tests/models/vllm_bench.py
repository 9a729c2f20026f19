"""`vllm bench serve` for a vLLM whose package is not named vllm: vLLM's own command fails to find its version.

Each line of standard input is a run, as a JSON list of arguments: importing vLLM takes longer than the runs.
"""

from __future__ import annotations

import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        main(parser.parse_args(json.loads(line)))
