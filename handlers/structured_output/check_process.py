"""Compiles grammars in a process whose memory and time are bounded, before the worker compiles them itself.

llguidance bounds most of what it does, but not all: `maxItems` of a billion allocates 8 GiB, and patterns that must all
match, or a large `multipleOf`, compute for minutes. A thread could not be stopped, so a process tries each grammar.

    python -P -m handlers.structured_output.check_process PARENT

reads one grammar per line as JSON, and answers each with a line: what is wrong with it, as JSON, or null. If a grammar
needs too much, the process ends.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_server.processes.parents import end_with_parent

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_UNKNOWN_TOKEN = re.compile('unknown special token: "([^"]+)"')
_KNOWN_TOKEN = "<|tool|>"

CHECK_SECONDS = 2
"""How long one grammar may compute, in seconds of processor time."""

CHECK_BYTES = 2**30
"""How many bytes of address space one grammar may take."""


class CheckProcess:
    """The process, started for the first grammar and again after one that ended it. Not for several threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> str | None:
        """Return what is wrong with a grammar; None if nothing is. Raises EOFError if it needs too much."""
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer:
            problem: str | None = json.loads(answer)
            return problem
        self.stop()
        raise EOFError

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "handlers.structured_output.check_process", str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def main() -> None:
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it ended before end_with_parent could see it
        return
    from llguidance import LLTokenizer

    # A token per byte is enough: what takes long is independent of the tokens.
    tokens = LLTokenizer("byte")
    _bound_memory()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CHECK_SECONDS)  # its signal ends the process
        problem = _problem(tokens, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(problem or None), flush=True)


def parser_limits() -> LLParserLimits:
    """Return how much llguidance may compute for a grammar: every step of a batch waits for the masks of all its rows.

    `max_lexer_states` bounds the memory of a compiled grammar, at 1 to 2 KiB per state. `step_*` bound the time of a
    mask to some ten milliseconds. The library's own limits hold where none is given.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _problem(tokens: Any, grammar: str) -> str:
    """Return what is wrong with a grammar. Special tokens that it names are the model's, and unknown here."""
    from llguidance import LLMatcher

    while True:
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()
        problem = str(matcher.get_error())
        unknown = _UNKNOWN_TOKEN.search(problem)
        if unknown is None or unknown[1] == _KNOWN_TOKEN:
            return problem
        grammar = grammar.replace(unknown[1], _KNOWN_TOKEN)


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
