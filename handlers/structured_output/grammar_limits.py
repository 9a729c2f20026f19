"""How much llguidance may compute for one grammar. Every step of a batch waits for the masks of all its rows."""

from __future__ import annotations

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """Return the limits; the library's own hold where none is given.

    `max_lexer_states` bounds the memory of a compiled grammar, at 1 to 2 KiB per state. `step_*` bound the time of a
    mask to some ten milliseconds.
    """
    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
