"""What each key may have: requests and tokens a minute, tokens a day and a month, models, a priority.

Plain data: no I/O, no asyncio; the times are given. A request is admitted while tokens are left, and its tokens are
counted once they are known: a key may go below zero with what runs, and waits for as much longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lmi_server.contract.errors import KeyBusyError, PermissionDeniedError
from lmi_server.contract.texts.quoting import excerpt

_MINUTE_S = 60.0
_LONGEST_RETRY_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of one key; None is no limit. `models` are patterns of names, with * and ?."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    models: tuple[str, ...] | None = None
    priority: int | None = None


class _Bucket:
    """Holds up to `size`, and gains that much each minute."""

    def __init__(self, size: int, now: float) -> None:
        self._size = size
        self._left = float(size)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return for how many seconds there is nothing left."""
        self._refill(now)
        return max(0.0, (1.0 - self._left) * _MINUTE_S / self._size)

    def take(self, count: float, now: float) -> None:
        self._refill(now)
        self._left -= count

    def _refill(self, now: float) -> None:
        self._left = min(float(self._size), self._left + max(0.0, now - self._at) * self._size / _MINUTE_S)
        self._at = max(self._at, now)


@dataclass(slots=True)
class _Spent:
    """The tokens of a key in the day and the month that are named, such as 2026-11-27 and 2026-11."""

    day: str = ""
    month: str = ""
    of_day: int = 0
    of_month: int = 0

    def turn(self, day: str) -> None:
        """Begin at zero in another day or month."""
        if day != self.day:
            self.day, self.of_day = day, 0
        if day[:7] != self.month:
            self.month, self.of_month = day[:7], 0


@dataclass(slots=True)
class _Account:
    limits: KeyLimits
    spent: _Spent = field(default_factory=_Spent)
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


class Accounts:
    """The account of each key, by the digest of the key. A key without one, or no key at all, has no limits."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, _Account] = {}

    def replace(self, limits: Mapping[bytes, KeyLimits], now: float) -> None:
        """Take the limits of a file that was read again. What was spent stays spent, also of a key that was renewed."""
        before = self._accounts
        spent = {account.limits.name: account.spent for account in before.values()}
        self._accounts = {}
        for digest, new in limits.items():
            old = before.get(digest)
            if old is not None and old.limits == new:
                self._accounts[digest] = old
                continue
            account = _Account(new, spent.get(new.name, _Spent()))
            account.requests = _bucket(new.requests_per_minute, now)
            account.tokens = _bucket(new.tokens_per_minute, now)
            self._accounts[digest] = account

    def admit(self, digest: bytes, names: Iterable[str], now: float, day: str) -> int | None:
        """Count a request for a model with any of `names`; return the priority of the key.

        `day` is today as 2026-11-27. Raises PermissionDeniedError, and KeyBusyError if there is a limit in the way.
        """
        account = self._accounts.get(digest)
        if account is None:
            return None
        limits = account.limits
        names = list(names)
        if limits.models is not None and not _allows(limits.models, names):
            raise PermissionDeniedError(f"This API key may not use the model {excerpt(names[0])}")
        account.spent.turn(day)
        _check_budgets(account)
        for bucket, what in (
            (account.requests, f"{limits.requests_per_minute} requests"),
            (account.tokens, f"{limits.tokens_per_minute} tokens"),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(now)
            if wait_s > 0.0:
                raise _refusal(f"This API key may have {what} a minute; send the request again later", wait_s)
        if account.requests is not None:
            account.requests.take(1, now)
        return limits.priority

    def limits_models(self, digest: bytes) -> bool:
        """Return whether a key may use some models only."""
        account = self._accounts.get(digest)
        return account is not None and account.limits.models is not None

    def count(self, digest: bytes, tokens: int, now: float, day: str) -> None:
        """Count the tokens of a request that has ended."""
        account = self._accounts.get(digest)
        if account is None or tokens <= 0:
            return
        if account.tokens is not None:
            account.tokens.take(tokens, now)
        account.spent.turn(day)
        account.spent.of_day += tokens
        account.spent.of_month += tokens

    # --- what outlives the process ---

    def usage_by_key(self) -> dict[str, dict[str, int | str]]:
        """Return what each key has spent, by its name."""
        return {
            each.limits.name: {
                "day": each.spent.day,
                "month": each.spent.month,
                "of_day": each.spent.of_day,
                "of_month": each.spent.of_month,
            }
            for each in self._accounts.values()
        }

    def restore(self, spent: Mapping[str, Mapping[str, int | str]]) -> None:
        """Take what the keys had spent before."""
        for account in self._accounts.values():
            found = spent.get(account.limits.name)
            if found is not None:
                account.spent.day, account.spent.month = str(found["day"]), str(found["month"])
                account.spent.of_day, account.spent.of_month = int(found["of_day"]), int(found["of_month"])


def _bucket(size: int | None, now: float) -> _Bucket | None:
    return None if size is None else _Bucket(size, now)


def _allows(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _check_budgets(account: _Account) -> None:
    limits, spent = account.limits, account.spent
    for allowed, used, period in (
        (limits.tokens_per_day, spent.of_day, "day"),
        (limits.tokens_per_month, spent.of_month, "month"),
    ):
        if allowed is not None and used >= allowed:
            message = f"This API key has spent its {allowed} tokens of this {period} (UTC)"
            raise _refusal(message, _LONGEST_RETRY_S)


def _refusal(message: str, wait_s: float) -> KeyBusyError:
    error = KeyBusyError(message)
    error.retry_after = max(1, min(_LONGEST_RETRY_S, math.ceil(wait_s)))
    return error
