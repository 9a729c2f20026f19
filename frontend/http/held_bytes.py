"""The requests' share of the memory for bodies, and the answers' share of theirs."""

from __future__ import annotations

from lmi_server.contract.errors import NoRoomError

SMALL_BODY = 64 * 1024  # bytes that a request may hold while others have taken the whole limit
_FOR_SMALL_BODIES = 32 << 20  # bytes beyond the limit that small bodies may take together


class MemoryBudget:
    """Memory for `limit` bytes, and a little more for small bodies. `used` is what is held of it.

    `peak` is the most that was held since it was set, for however short. `full` is the message for what finds no room.
    """

    def __init__(self, limit: int, full: str) -> None:
        self.used = self.peak = 0
        self.full = full
        self._limit = limit

    def has_room(self, size: int) -> bool:
        """Return whether a request may have its `size` bytes, which are counted already."""
        return self.used <= self._limit or (size <= SMALL_BODY and self.used <= self._limit + _FOR_SMALL_BODIES)


class HeldBytes:
    """What one request holds: its body as it arrived, and what was decoded of it; or its answer.

    `is_kept` is set once the one that serves the request will release it. Until then its connection does.
    """

    __slots__ = ("_budget", "is_kept", "size")

    def __init__(self, budget: MemoryBudget) -> None:
        self.size = 0
        self.is_kept = False
        self._budget = budget

    @property
    def full(self) -> str:
        """Return the message for what finds no room."""
        return self._budget.full

    def add(self, size: int) -> bool:
        """Count `size` more bytes, or fewer if it is negative; return whether there is room for them."""
        self.size += size
        self._budget.used += size
        if self._budget.used > self._budget.peak:
            self._budget.peak = self._budget.used
        return self._budget.has_room(self.size)

    def reserve(self, size: int) -> None:
        """Count `size` more bytes before they take memory. Raises NoRoomError, and has counted nothing then."""
        if not self.add(size):
            self.add(-size)
            raise NoRoomError(self.full)

    def another(self) -> HeldBytes:
        """Return the same for another request, which holds nothing yet."""
        return HeldBytes(self._budget)

    def release(self) -> None:
        """Count nothing any more."""
        self._budget.used -= self.size
        self.size = 0
