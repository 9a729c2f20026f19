"""A new version of a model beside the old one, until it is promoted or taken back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from enum import Enum
from typing import Any

from frontend.canary.comparison import Compared
from frontend.canary.copies import SENT, Copies
from frontend.canary.figures import Figures
from frontend.canary.outcomes import outcome_of
from frontend.canary.rules import Rules
from frontend.observability.request_record import CLIENT_GONE
from lmi_server.contract.errors import LmiServerError, ModelNotReadyError
from lmi_server.contract.protocol import Error, Input
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.serving.dispatch.affinity.sticky_sessions import TO_BE_OPENED, session_of
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.supervisor.job import Job

logger = logging.getLogger(__name__)

_CHECK_S = 0.2


class TakenBackError(LmiServerError):
    """The new version does not take the place of the old one, for that reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the new version is taken back: {reason}")
        self.reason = reason


class Verdict(Enum):
    """The words of the management API."""

    LOADING = "LOADING"
    RUNNING = "RUNNING"
    PROMOTED = "PROMOTED"
    TAKEN_BACK = "TAKEN_BACK"


class CanaryTrial:
    """Gives the new version a share of the requests, or with `shadow` copies of that share, and judges it by `rules`.

    Requests of a session stay with the version that they began with, and all others are told apart by chance.
    """

    def __init__(self, model: Model, share: float, rules: Rules, shadow: bool, drain_timeout_s: float) -> None:
        self.model = model
        self.share = share
        self.shadow = shadow
        self.verdict = Verdict.LOADING
        self.reason = ""
        self.old, self.new = Figures(), Figures()
        self.over = asyncio.Event()
        self._compared = Compared() if shadow else None
        self._copies: Copies | None = None
        self._rules = rules
        self._drain_timeout_s = drain_timeout_s
        self._salt = os.urandom(16)
        self._pool: WorkerPool | None = None
        self._asked: Verdict | None = None  # by a call
        self._ends = 0.0

    @property
    def is_over(self) -> bool:
        return self.verdict in (Verdict.PROMOTED, Verdict.TAKEN_BACK)

    # --- of the model ---

    def choose(self, pool: WorkerPool, request: Input) -> WorkerPool:
        new = self._pool
        if new is None or not self._is_drawn(request, pool, new):
            return pool
        if self._copies is not None:
            self._copies.make(request)
            return pool
        return new if new.roster.ready else pool  # its worker has died: the old version serves meanwhile

    def note(self, pool: WorkerPool, job: Job, status: int) -> None:
        terminal = job.reply.terminal
        summary = None if terminal is None or isinstance(terminal, Error) else terminal.summary
        seconds = time.monotonic() - job.queued_at
        figures = self.new if pool is self._pool else self.old
        per_token = seconds / max(summary.output_tokens, 1) if summary is not None else seconds
        outcome = outcome_of(status, terminal)
        figures.add(outcome, per_token)
        sent = SENT.get()
        if sent is not None and status != CLIENT_GONE:
            sent.outcome = outcome

    def _is_drawn(self, request: Input, old: WorkerPool, new: WorkerPool) -> bool:
        """Return whether the new version gets a request, or its copy."""
        session = session_of(request)
        if session is not None:
            for pool, drawn in ((old, False), (new, True)):
                sessions = pool.dispatcher.router.sessions
                if sessions is not None and sessions.worker_of(request) is not None:
                    return drawn
        if session in (None, TO_BE_OPENED):
            session = request.request_id
        number = hashlib.blake2b(session.encode("utf-8", "replace"), digest_size=8, key=self._salt).digest()
        return int.from_bytes(number) < self.share * 2**64

    # --- of the registry ---

    async def prove(self, after: Model) -> None:
        """Return once the new version may take the place of the old one. Raises TakenBackError if it may not."""
        pool = after.loaded()
        if self._compared is not None:
            self._copies = Copies(pool, self.new, self._compared)
        self._pool, self.verdict = pool, Verdict.RUNNING
        self._ends = time.monotonic() + self._rules.duration_s
        self.model.trial = self
        what = "copies of " if self.shadow else ""
        logger.info("model %s: the new version gets %s%g %% of the requests", self.model.label, what, self.share * 100)
        copies = self._copies
        try:
            await self._judge(pool)
            self._end(Verdict.PROMOTED, self.reason)
        except BaseException as error:
            self._end(Verdict.TAKEN_BACK, error.reason if isinstance(error, TakenBackError) else "its model has ended")
            await self._let_go(pool, copies)
            raise
        if copies is not None:
            await copies.stop()

    def ask(self, verdict: Verdict) -> None:
        """Have it promoted, or taken back, whatever the figures say."""
        self._asked = verdict

    def fail(self, error: LmiServerError) -> None:
        """Note why the new version could not even be tried."""
        if not self.is_over:
            self._end(Verdict.TAKEN_BACK, error.message)

    async def _judge(self, pool: WorkerPool) -> None:
        """Return when the new version is to be promoted. Raises TakenBackError."""
        while True:
            if self._asked is Verdict.PROMOTED and pool.availability.failure is None:
                self.reason = "a call asked for it"
                return
            objection = self._objection(pool)
            if objection is not None:
                raise TakenBackError(objection)
            if self.new.judging >= self._rules.requests:
                finding = self._rules.finding(self.old, self.new)
                self.reason = f"{self.new.judging} requests spoke for it{'' if finding is None else f', but {finding}'}"
                return
            await asyncio.sleep(_CHECK_S)

    def _objection(self, pool: WorkerPool) -> str | None:
        if self._asked is Verdict.TAKEN_BACK:
            return "a call asked for it"
        if pool.availability.failure is not None or pool.members.deaths:
            return "a worker of it has died"
        if self.new.judging >= self._rules.requests:
            return self._rules.objection(self.old, self.new, self._compared)
        if time.monotonic() >= self._ends:
            return (
                f"only {self.new.judging} of {self._rules.requests} requests came within {self._rules.duration_s:g}"
                " seconds" + (f", and {self.new.refused} that it refused" if self.new.refused else "")
            )
        return self._rules.early_objection(self.old, self.new)

    def _end(self, verdict: Verdict, reason: str) -> None:
        """Send every request to the model's own pool again, which is soon the new one if it was promoted."""
        self.verdict, self.reason = verdict, reason
        self._pool = self._copies = None  # what is known of the trial outlives them
        self.over.set()
        if self.model.trial is self:
            self.model.trial = None
        logger.info("model %s: the new version is %s: %s", self.model.label, verdict.value, reason)

    async def _let_go(self, pool: WorkerPool, copies: Copies | None) -> None:
        """Let the requests that the new version has finish: the registry ends its workers after this."""
        if copies is not None:
            await copies.stop()
        ends = time.monotonic() + self._drain_timeout_s
        while (pool.dispatcher.queued or pool.dispatcher.in_flight) and time.monotonic() < ends:
            if not pool.roster.ready and pool.availability.failure is not None:
                return
            await asyncio.sleep(_CHECK_S)

    def describe(self) -> dict[str, Any]:
        """Return what the management API says."""
        workers = {} if self._pool is None else {"workers": sorted(self._pool.roster.pids.values())}
        copies = {} if self._compared is None else {"copies": self._compared.describe()}
        left = {} if self._pool is None else {"secondsLeft": max(0.0, round(self._ends - time.monotonic(), 1))}
        return {
            "status": self.verdict.value,
            "kind": "shadow" if self.shadow else "canary",
            "sharePercent": self.share * 100,
            "judgedAfter": self._rules.requests,
            **left,
            **({"reason": SECRETS.masked(self.reason)} if self.reason else {}),
            "old": self.old.describe(),
            "new": self.new.describe(),
            **copies,
            **workers,
        }


def refuse_if_not_loaded(model: Model) -> None:
    """Raise ModelNotReadyError for a model without an old version to compare with."""
    if not model.loaded().roster.ready:
        raise ModelNotReadyError(f"Model {model.label} has no worker that serves, to compare a new version with")
