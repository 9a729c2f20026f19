"""The values of options that a search tries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_server.client.trial_server import PARAMETERS
from lmi_server.configuration.options import ServingOptions
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError

_PASSED_ON = "it is passed on to the handler"
_LISTED = ", ".join(PARAMETERS)
_SERVING = frozenset(option.key for option in ServingOptions.declared_options())  # keys without "option."
_ROUNDING = 1e-9  # a share of a step
_FORMS = "NAME=8,16,32 for these values, NAME=0.8:0.95 for a range, NAME=1000:8000:1000 with a step"


@dataclass(frozen=True, slots=True)
class Choices:
    """An option that takes one of these values."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """An option that takes numbers from `low` to `high`; whole ones if both of them are, and `step` is."""

    low: float
    high: float
    step: float | None = None

    @property
    def is_whole(self) -> bool:
        return all(float(bound).is_integer() for bound in (self.low, self.high, self.step or 1))


Space = Mapping[str, Choices | Range]
"""What is tried of each key of serving.properties."""

# The variables of vLLM's auto_tune.sh, which lists candidates for arguments of vLLM's.
_SCRIPT_LISTS = {
    "NUM_SEQS_LIST": "option.max_rolling_batch_size",
    "NUM_BATCHED_TOKENS_LIST": "option.max_rolling_batch_prefill_tokens",
    "MAX_MODEL_LEN": "option.max_model_len",  # one value
}


def parse_space(options: Sequence[str]) -> dict[str, Choices | Range]:
    """Return the space of `--option` arguments. A name without "option." means an option of the model.

    Raises ConfigurationError if one cannot be read.
    """
    space: dict[str, Choices | Range] = {}
    for option in options:
        name, separator, values = option.partition("=")
        if not separator or not name.strip() or not values.strip():
            raise ConfigurationError(f'--option "{option}" is not allowed; allowed: {_FORMS}')
        space[_key(name.strip())] = _values(option, values)
    return space


def space_of_script(variables: Mapping[str, str]) -> dict[str, Choices | Range]:
    """Return the space of the variables that vLLM's auto_tune.sh reads; empty if none is set."""
    return {
        key: Choices(tuple(variables[name].split()))
        for name, key in _SCRIPT_LISTS.items()
        if variables.get(name, "").split()
    }


def check_space(directory: Path, space: Space, environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError if the model has no such option, or an option takes none of its values."""
    as_it_is = inspect_model(directory, environment)
    before = {*as_it_is.warnings, *as_it_is.problems}
    for key, values in space.items():
        listed = values.values if isinstance(values, Choices) else (text_of(values.low), text_of(values.high))
        for value in listed:
            found = inspect_model(directory, environment, {key: value})
            # A key that changes nothing is a warning elsewhere; here each of its values would cost a trial.
            ignored = [text for text in found.warnings if _PASSED_ON not in text]
            problems = [text for text in (*ignored, *found.problems) if text not in before]
            if problems:
                raise ConfigurationError(f"--option {key.removeprefix('option.')}: {problems[0]}")


def size_of(space: Space) -> int | None:
    """Return how many combinations there are; None if there is no end of them."""
    sizes = []
    for values in space.values():
        if isinstance(values, Choices):
            sizes.append(len(set(values.values)))
        elif values.step is None and not values.is_whole:
            return None
        else:
            sizes.append(math.floor((values.high - values.low) / (values.step or 1) + _ROUNDING) + 1)
    return math.prod(sizes)


def grid(space: Space) -> Iterator[dict[str, str]]:
    """Yield every combination. Raises ConfigurationError if a range has no step."""
    lists = []
    for key, values in space.items():
        if isinstance(values, Range) and values.step is None:
            raise ConfigurationError(f"--grid needs a step for the range of {key}: LOW:HIGH:STEP")
        lists.append(values.values if isinstance(values, Choices) else tuple(_steps(values)))
    return (dict(zip(space, combination, strict=True)) for combination in itertools.product(*lists))


def text_of(value: float | str) -> str:
    """Return a value as serving.properties has it."""
    return value if isinstance(value, str) else f"{value:.12g}"


def _key(name: str) -> str:
    key = name if name.startswith("option.") or name in _SERVING else f"option.{name}"
    if key in _SERVING and key not in PARAMETERS:
        raise ConfigurationError(f"--option {name} cannot be tried; of the keys of the server only {_LISTED} can")
    return key


def _values(option: str, text: str) -> Choices | Range:
    if ":" not in text:
        return Choices(tuple(value.strip() for value in text.split(",") if value.strip()))
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(map(math.isfinite, numbers)) or numbers[0] >= numbers[1]:
        raise ConfigurationError(f'--option "{option}" is not allowed; allowed: {_FORMS}')
    if len(numbers) == 3 and numbers[2] <= 0:
        raise ConfigurationError(f'--option "{option}" is not allowed: the step must be above 0')
    return Range(*numbers)


def _steps(values: Range) -> Iterator[str]:
    assert values.step is not None
    count = math.floor((values.high - values.low) / values.step + _ROUNDING)
    return (text_of(values.low + number * values.step) for number in range(count + 1))
