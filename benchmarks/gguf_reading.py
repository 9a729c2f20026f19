"""`python -m benchmarks.gguf_reading`: seconds of a processor that transformers takes for a file in GGUF.

It unpacks the weights of the demo model, whose file has 49,152 tokens, in fresh processes: in turns with the package
gguf as it is, and with what lmi_server/processes/gguf_package.py makes of it.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from statistics import median

from benchmarks.figures import in_turns, parser_of

_LOAD = """
import sys, time
import torch, gguf
from transformers import AutoTokenizer, GgufConfig, LlamaForCausalLM
from lmi_server.commands.demo_model import _find_gguf
from lmi_server.processes import gguf_package
if sys.argv[1] == "prepared":
    gguf_package.prepare()
source, began = _find_gguf(), time.process_time()
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
read = time.process_time()
weights = GgufConfig(dequantize=True, gguf_file=source.name)
LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, quantization_config=weights)
print(read - began, time.process_time() - read)
"""


def _seconds(way: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", _LOAD, way], capture_output=True, text=True, check=True)
    return [float(seconds) for seconds in done.stdout.split()]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    runs = {way: partial(_seconds, way) for way in ("as it is", "prepared")}
    for way, taken in in_turns(turns, runs, warm=False).items():
        tokenizer, weights = (median(seconds) for seconds in zip(*taken, strict=True))
        print(f"gguf {way}: {tokenizer:.1f} s for the tokenizer, {weights:.1f} s for the weights")


if __name__ == "__main__":
    main()
