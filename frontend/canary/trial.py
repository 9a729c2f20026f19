"""A new version of a model beside the old one, until it is promoted or taken back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import Counter
from contextvars import ContextVar
from enum import Enum
from random import random
from typing import Any

from frontend.canary.comparison import Compared
from frontend.canary.copies import SENT, Copies
from frontend.canary.figures import AnswerOutcome, Figures, outcome_of
from frontend.canary.rules import Rules
from frontend.canary.sessions import named_session
from frontend.observability.request_record import CLIENT_GONE
from lmi_server.contract.errors import LmiServerError, ModelNotReadyError
from lmi_server.contract.protocol import Error, Input
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.supervisor.job import Job

logger = logging.getLogger(__name__)

_CHECK_S = 0.2
_DRAWN: ContextVar[tuple[Input, float] | None] = ContextVar("_DRAWN", default=None)
"""The number that was drawn for the request which the running task serves."""


class Draw:
    """Draws a share of the requests: sessions as a whole, and all other requests one by one."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._salt = os.urandom(16)

    def includes(self, request: Input, old: WorkerPool, new: WorkerPool) -> bool:
        """Return whether the new version gets a request, or its copy; the same for the same request."""
        session = named_session(request)
        if session is None:
            return self._includes_by_chance(request)
        for pool, drawn in ((old, False), (new, True)):
            sessions = pool.dispatcher.router.sessions
            if sessions is not None and sessions.worker_of(request) is not None:
                return drawn
        return int.from_bytes(self._digest(session)) < self.share * 2**64

    def session(self, request: Input, tenant: bytes) -> bytes | None:
        """Return what stands for the session of a request, None if it has none. No API key has that of another."""
        session = named_session(request)
        return None if session is None else self._digest(session, tenant)

    def _includes_by_chance(self, request: Input) -> bool:
        """Draw a number, and not one that follows from the request's id: the client may have chosen that."""
        drawn = _DRAWN.get()
        if drawn is None or drawn[0] is not request:
            drawn = (request, random())
            _DRAWN.set(drawn)
        return drawn[1] < self.share

    def _digest(self, session: str, tenant: bytes = b"") -> bytes:
        name = session.encode("utf-8", "replace")
        return hashlib.blake2b(tenant + name, digest_size=8, key=self._salt).digest()


class TakenBackError(LmiServerError):
    """The new version does not take the place of the old one, for that reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the new version is taken back: {reason}")
        self.reason = reason


class TrialVerdict(Enum):
    """The words of the management API."""

    LOADING = "LOADING"
    RUNNING = "RUNNING"
    PROMOTED = "PROMOTED"
    TAKEN_BACK = "TAKEN_BACK"


class CanaryTrial:
    """Gives the new version a share of the requests, or with `shadow` copies of that share, and judges it by `rules`.

    Requests of a session stay with the version that they began with, and all others are told apart by chance. No client
    decides alone: of a session only some requests count, and of an API key what chance would give it, and some more.
    """

    def __init__(self, model: Model, share: float, rules: Rules, shadow: bool, drain_timeout_s: float) -> None:
        self.model = model
        self._draw = Draw(share)
        self.shadow = shadow
        self.verdict = TrialVerdict.LOADING
        self.reason = ""
        self.old, self.new = Figures(rules.max_of_client), Figures(rules.max_of_client)
        self.over = asyncio.Event()
        self._compared = Compared() if shadow else None
        self._copies: Copies | None = None
        self._rules = rules
        self._drain_timeout_s = drain_timeout_s
        self.pool: WorkerPool | None = None
        self._asked: TrialVerdict | None = None  # by a call
        self._sent: Counter[bytes] = Counter()  # requests that have ended by the API key
        self._sent_to_new: Counter[bytes] = Counter()  # those of them that the new version had, and that count
        self._ends = 0.0

    @property
    def share(self) -> float:
        return self._draw.share

    @property
    def is_over(self) -> bool:
        return self.verdict in (TrialVerdict.PROMOTED, TrialVerdict.TAKEN_BACK)

    # --- of the model ---

    def choose(self, pool: WorkerPool, request: Input) -> WorkerPool:
        new, sent = self.pool, SENT.get()
        if new is None:
            return pool
        tenant = b"" if sent is None else sent.tenant
        chosen = pool
        if self._draw.includes(request, pool, new):
            if self._copies is not None:
                self._copies.make(request, self._draw.session(request, tenant))
            elif new.roster.ready:  # otherwise its worker has died: the old version serves meanwhile
                chosen = new
        if sent is not None:
            sent.on_refusal = lambda: self._refuse(chosen is new, request, tenant)
        return chosen

    def note(self, pool: WorkerPool, job: Job, status: int) -> None:
        terminal = job.reply.terminal
        summary = None if terminal is None or isinstance(terminal, Error) else terminal.summary
        seconds = time.monotonic() - job.queued_at
        per_token = seconds / max(summary.output_tokens, 1) if summary is not None else seconds
        outcome = outcome_of(status, terminal)
        self._add(outcome, per_token, pool is self.pool, job.request, job.tenant)
        sent = SENT.get()
        if sent is not None:
            sent.on_refusal, sent.began = None, job.queued_at  # as the time of a copy
            sent.outcome = None if status == CLIENT_GONE else outcome

    def _refuse(self, is_new: bool, request: Input, tenant: bytes) -> None:
        """Count a request that its version had no room for. Once the trial is over, nothing says that it was served."""
        if not self.is_over:
            self._add(AnswerOutcome.REFUSED, 0.0, is_new, request, tenant)

    def _add(self, outcome: AnswerOutcome, per_token: float, is_new: bool, request: Input, tenant: bytes) -> None:
        """Count a request, unless its API key sticks to the new version."""
        self._sent[tenant] += 1
        session = self._draw.session(request, tenant)
        if not is_new:
            self.old.add(outcome, per_token, session)
        elif self._sent_to_new[tenant] >= self.share * self._sent[tenant] + self._rules.max_of_client:
            self.new.uncounted += 1
        elif self.new.add(outcome, per_token, session):
            self._sent_to_new[tenant] += 1

    # --- of the registry ---

    async def prove(self, after: Model) -> None:
        """Return once the new version may take the place of the old one. Raises TakenBackError if it may not."""
        pool = after.loaded()
        if self._compared is not None:
            self._copies = Copies(pool, self.new, self._compared)
        self.pool, self.verdict = pool, TrialVerdict.RUNNING
        self._ends = time.monotonic() + self._rules.duration_s
        self.model.trial = self
        what = "copies of " if self.shadow else ""
        logger.info("model %s: the new version gets %s%g %% of the requests", self.model.label, what, self.share * 100)
        copies = self._copies
        try:
            await self._judge(pool)
            self._end(TrialVerdict.PROMOTED, self.reason)
        except BaseException as error:
            self._end(
                TrialVerdict.TAKEN_BACK, error.reason if isinstance(error, TakenBackError) else "its model has ended"
            )
            await self._let_go(pool, copies)
            raise
        if copies is not None:
            await copies.stop()

    def ask(self, verdict: TrialVerdict) -> None:
        """Have it promoted, or taken back, whatever the figures say."""
        self._asked = verdict

    def fail(self, error: LmiServerError) -> None:
        """Note why the new version could not even be tried."""
        if not self.is_over:
            self._end(TrialVerdict.TAKEN_BACK, error.message)

    async def _judge(self, pool: WorkerPool) -> None:
        """Return when the new version is to be promoted. Raises TakenBackError."""
        while True:
            if self._asked is TrialVerdict.PROMOTED and pool.availability.failure is None:
                self.reason = "a call asked for it"
                return
            objection = self._objection(pool)
            if objection is not None:
                raise TakenBackError(objection)
            if self.new.total.judging >= self._rules.requests and self._doubt() is None:
                finding = self._rules.finding(self.old, self.new)
                but = "" if finding is None else f", but {finding}"
                self.reason = f"{self.new.total.judging} requests spoke for it{but}"
                return
            await asyncio.sleep(_CHECK_S)

    def _objection(self, pool: WorkerPool) -> str | None:
        if self._asked is TrialVerdict.TAKEN_BACK:
            return "a call asked for it"
        if pool.availability.failure is not None or pool.members.deaths:
            return "a worker of it has died"
        if self.new.total.judging >= self._rules.requests:
            objection = self._rules.objection(self.old, self.new, self._compared)
            return objection or (self._doubt() if time.monotonic() >= self._ends else None)
        if time.monotonic() >= self._ends:
            return self._too_few()
        return self._rules.early_objection(self.old, self.new)

    def _doubt(self) -> str | None:
        """Return what one session alone says against the new version; the others may outweigh it."""
        doubt = self._rules.doubt(self.old, self.new, self._compared)
        return None if doubt is None else f"it is in doubt, because of one session: {doubt}"

    def _too_few(self) -> str:
        new, rules = self.new, self._rules
        few = f"only {new.total.judging} of {rules.requests} requests came within {rules.duration_s:g} seconds"
        refused = f", and {new.total.refused} that it refused" if new.total.refused else ""
        share = f"max_client={rules.max_client * 100:g} %"
        return few + refused + (f", and {new.uncounted} of clients beyond {share}" if new.uncounted else "")

    def _end(self, verdict: TrialVerdict, reason: str) -> None:
        """Send every request to the model's own pool again, which is soon the new one if it was promoted."""
        self.verdict, self.reason = verdict, reason
        self.pool = self._copies = None  # what is known of the trial outlives them
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
        workers = {} if self.pool is None else {"workers": sorted(self.pool.roster.pids.values())}
        copies = {} if self._compared is None else {"copies": self._compared.describe()}
        left = {} if self.pool is None else {"secondsLeft": max(0.0, round(self._ends - time.monotonic(), 1))}
        is_late = self.pool is not None and self.new.total.judging >= self._rules.requests
        doubt = self._doubt() if is_late else None
        return {
            "status": self.verdict.value,
            "kind": "shadow" if self.shadow else "canary",
            "sharePercent": self.share * 100,
            "judgedAfter": self._rules.requests,
            **left,
            **({} if doubt is None else {"doubt": doubt}),
            **({"reason": SECRETS.mask(self.reason)} if self.reason else {}),
            "old": self.old.describe(),
            "new": self.new.describe(),
            **copies,
            **workers,
        }


def refuse_if_not_loaded(model: Model) -> None:
    """Raise ModelNotReadyError for a model without an old version to compare with."""
    pool = model.loaded()
    if pool.availability.paused is not None:
        raise ModelNotReadyError(pool.availability.paused)
    if not pool.roster.ready:
        raise ModelNotReadyError(f"Model {model.label} has no worker that serves, to compare a new version with")
