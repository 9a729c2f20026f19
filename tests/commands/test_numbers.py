"""Numbers on the command line: each command refuses what is none by its flag, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lmi_server.client.numbers import NumberFlag
from lmi_server.commands.cli import app
from lmi_server.contract.errors import ConfigurationError


def options(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every option of every command, with the words that call the command."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from options(command, *path, name)
            continue
        yield from (((*path, name), option) for option in command.params if option.opts[0].startswith("--"))


ALL = list(options(typer.main.get_command(app)))
NUMBERS = [(words, option.opts[0]) for words, option in ALL if option.metavar in ("INTEGER", "NUMBER")]


def test_every_number_of_a_command_is_checked_by_the_same_rule() -> None:
    kinds = {option.type_descriptor.annotation for _, option in ALL}
    assert int in kinds
    wrong = [
        (words, option.opts[0])
        for words, option in ALL
        if option.type_descriptor.annotation in (int, float) and (words, option.opts[0]) not in NUMBERS
    ]
    assert not wrong
    assert len(NUMBERS) > 40


def refusal(*words: str) -> str:
    """Return the one line with which a command ends."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(("words", "flag"), NUMBERS, ids=[" ".join((*words, flag)) for words, flag in NUMBERS])
def test_a_flag_refuses_what_is_no_number(words: tuple[str, ...], flag: str) -> None:
    for text in ("nan", "-1"):
        assert refusal(*words, flag, text).startswith(f'{flag} "{text}" is not allowed; allowed: a')


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("abc", "abc"),
        ("0", "0"),
        ("inf", "inf"),
        ("9" * 5000, "99"),
        ("", '"'),
        ("1\n2", "1\\n2"),
        ("\udcff", "\\udcff"),
        ("\x1b[2J", "\\x1b[2J"),
    ],
)
def test_a_refusal_is_one_line_whatever_the_text(text: str, quoted: str) -> None:
    line = refusal("verify", "--timeout", text)
    assert line.startswith(f'--timeout "{quoted}')
    assert line.endswith("is not allowed; allowed: a number of seconds above 0 and at most 1000000")
    assert len(line) < 400


@pytest.mark.parametrize(
    ("flag", "taken", "refused", "allowed"),
    [
        (NumberFlag("--n", 1, 8, is_integer=True), ["1", "8"], ["0", "9", "1.0", "inf"], "an integer from 1 to 8"),
        (NumberFlag("--n", 0, is_above=True), ["1e-9", "1e300"], ["0", "inf"], "a number above 0"),
        (NumberFlag("--n", 0, 2, is_above=True), ["2"], ["2.1"], "a number above 0 and at most 2"),
        (NumberFlag("--n", 0, is_above=True, takes_infinity=True), ["inf"], ["-inf"], "a number above 0 or inf"),
        (NumberFlag("--n", 0, 100), ["0", "100"], ["100.5"], "a number from 0 to 100"),
        (
            NumberFlag("--n", 1, 9, takes_infinity=True),
            ["9", "inf"],
            ["10", "0", "-inf"],
            "a number from 1 to 9 or inf",
        ),
        (NumberFlag("--n", 0, what="a number of seconds"), ["0"], ["-0.1"], "a number of seconds of 0 or more"),
    ],
)
def test_what_is_allowed(flag: NumberFlag, taken: list[str], refused: list[str], allowed: str) -> None:
    assert [flag.parse(text) for text in taken] == [float(text) for text in taken]
    for text in refused:
        with pytest.raises(ConfigurationError) as error:
            flag.parse(text)
        assert error.value.message == f'--n "{text}" is not allowed; allowed: {allowed}'


def test_no_shift_of_log_probabilities_at_all_is_a_limit() -> None:
    words = ("reload", "model", "--shadow", "--max-shift", "0", "--url", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 does not answer" in CliRunner().invoke(app, words).stderr
