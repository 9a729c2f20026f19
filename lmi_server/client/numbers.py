"""Numbers on the command line: what is none, or out of range, is refused with its flag and what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import typer

from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt

MAX_COUNT = 10_000_000
"""Of what a flag counts, if it does not say more."""
MAX_FACTOR = 1_000_000_000
"""Of rates, speeds, weights and other factors: their sums are finite, and their shares of a second above 0."""
_MAX_SECONDS = 1_000_000  # about what a socket takes as its timeout
_SECONDS = "a number of seconds"
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class NumberFlag:
    """The numbers that a flag takes: from `low`, which is not allowed itself if it `is_above`, to `high`.

    `takes_infinity` allows infinity as well. `what` is what one is called.
    """

    flag: str
    low: float
    high: float = math.inf
    is_above: bool = False
    is_integer: bool = False
    takes_infinity: bool = False
    what: str = "a number"

    def parse(self, text: str) -> Any:
        """Return the number. Raises ConfigurationError if the flag does not take it."""
        try:
            number = int(text) if self.is_integer else float(text)
        except ValueError:
            number = math.nan
        is_in_range = self.low < number <= self.high if self.is_above else self.low <= number <= self.high
        if not (self.takes_infinity if number == math.inf else is_in_range):
            raise ConfigurationError(f'{self.flag} "{excerpt(text)}" is not allowed; allowed: {self._allowed()}')
        return number

    def _allowed(self) -> str:
        kind = "an integer" if self.is_integer else self.what
        end = "" if self.high == math.inf else f"{' and' if self.is_above else ''} at most {self.high:.15g}"
        infinity = " or inf" if self.takes_infinity else ""
        if self.is_above:
            return f"{kind} above {self.low:g}{end}{infinity}"
        return f"{kind} from {self.low:g} to {self.high:.15g}{infinity}" if end else f"{kind} of {self.low:g} or more"


def number_option(flag: NumberFlag, help_text: str) -> Any:
    """Return the option of a command that takes such a number."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str):  # the default
            return value
        with plain_configuration_errors():
            return flag.parse(value)

    return typer.Option(flag.flag, parser=parse, metavar="INTEGER" if flag.is_integer else "NUMBER", help=help_text)


def count(flag: str, help_text: str, low: int = 1, high: int = MAX_COUNT) -> Any:
    """Return an option that takes an integer."""
    return number_option(NumberFlag(flag, low, high, is_integer=True), help_text)


def port(help_text: str) -> Any:
    """Return the option `--port`."""
    return count("--port", help_text, 0, 65535)


def seed(help_text: str) -> Any:
    """Return the option `--seed`."""
    return count("--seed", help_text, 0, _MAX_SEED)


def seconds(flag: str, help_text: str, low: float = 0, high: float = _MAX_SECONDS) -> Any:
    """Return an option that takes seconds: more than 0, or `low` and more."""
    return number_option(NumberFlag(flag, low, high, is_above=not low, what=_SECONDS), help_text)


def delay(flag: str, help_text: str) -> Any:
    """Return an option that takes seconds, or 0."""
    return number_option(NumberFlag(flag, 0, _MAX_SECONDS, what=_SECONDS), help_text)


def fraction(flag: str, help_text: str, whole: float = 1) -> Any:
    """Return an option that takes a share of `whole`, such as 100 percent."""
    return number_option(NumberFlag(flag, 0, whole), help_text)


def factor(flag: str, help_text: str) -> Any:
    """Return an option that takes a number above 0."""
    return number_option(NumberFlag(flag, 0, MAX_FACTOR, is_above=True), help_text)
