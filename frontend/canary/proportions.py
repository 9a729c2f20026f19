"""Whether two shares differ by more than chance: Fisher's exact test of a table of two rows, one-sided.

R. A. Fisher, "On the interpretation of chi-squared from contingency tables", 1922. It is right for small counts, too.
"""

from __future__ import annotations

from math import exp, lgamma

_NEGLIGIBLE = 1e-9  # of the sum, below which no further term counts


def chance_of_more(few: int, of_few: int, many: int, of_many: int) -> float:
    """Return the probability of `many` or more of `of_many`, beside `few` of `of_few`, if the true shares are equal.

    It is 1 unless the share of `many` is the larger one.
    """
    if not of_few or not of_many or many * of_few <= few * of_many:
        return 1.0
    total, marked = of_few + of_many, few + many
    term = exp(_ways(marked, many) + _ways(total - marked, of_many - many) - _ways(total, of_many))
    found = 0.0
    for count in range(many, min(of_many, marked) + 1):  # terms fall from here on: `many` is above the mean
        found += term
        if term <= _NEGLIGIBLE * found:
            break
        term *= (marked - count) * (of_many - count) / ((count + 1) * (total - marked - of_many + count + 1))
    return min(found, 1.0)


def _ways(count: int, chosen: int) -> float:
    """Return the logarithm of the binomial coefficient."""
    return lgamma(count + 1) - lgamma(chosen + 1) - lgamma(count - chosen + 1)
