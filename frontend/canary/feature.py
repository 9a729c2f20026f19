"""Answers /models/{model}/canary, where a new version of a model begins to prove itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.access.api_keys import TENANT
from frontend.access.management_access import protect
from frontend.canary.copies import SENT, SentAnswer
from frontend.canary.rules import Rules
from frontend.canary.trial import CanaryTrial, TrialVerdict, refuse_if_not_loaded
from frontend.features import ServerFeature, ServerParts
from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.http.parameters import integer, parameters, truth
from frontend.http.responses import json_response
from frontend.management.adapters import managed_model
from frontend.management.models import WholePathRoute
from lmi_server.contract.errors import BadParameterError, LmiServerError, ModelExistsError, ModelNotFoundError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.serving.models.model import Model

_REQUESTS, _DURATION_S, _MAX_ERRORS, _MAX_SLOWER, _MAX_CHANGED = 200, 3600.0, 1.0, 1.2, 100.0
_MAX_CLIENT = 10.0
_MAX_SHIFT = 1e6
_LONGEST_S = 7 * 24 * 3600.0


def attach(server: ServerParts) -> ServerFeature:
    """Return the feature, which every server has."""
    canary = CanaryFeature(server)
    server.metrics.sources.append(canary.families)
    return canary


class CanaryFeature(ServerFeature):
    """The calls. Each raises LmiServerError, which the application turns into an answer."""

    def __init__(self, server: ServerParts) -> None:
        self._models = server.models
        self._guard = server.access.guard
        self._drain_timeout_s = server.settings.drain_timeout
        self._trials: dict[Model, CanaryTrial] = {}  # the last one of each model
        self._running: set[CanaryTrial] = set()  # those of them that are not over
        self._reloads: set[asyncio.Task[None]] = set()

    def wrap(self, infer: Inference) -> Inference:
        running = self._running

        async def noting(target: Target, scope: Scope, receive: Receive, send: Send) -> None:
            sent = SentAnswer(scope.get(TENANT, b""))
            token = SENT.set(sent)
            try:
                await infer(target, scope, receive, sent.sending(send))
            finally:
                SENT.reset(token)
                sent.end()

        def call(target: Target, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            """Serve a request. Without a trial it costs this look, and no coroutine of its own."""
            return (noting if running else infer)(target, scope, receive, send)

        return call

    def management_routes(self) -> list[Route]:
        routes: list[Route] = [
            WholePathRoute("/models/{model}/canary", {"POST": self.begin}),
            WholePathRoute("/models/{model}/canary/promote", {"POST": self.promote}),
            WholePathRoute("/models/{model}/canary/take_back", {"POST": self.take_back}),
        ]
        return protect(routes, self._guard.check)

    async def begin(self, request: Request) -> Response:
        """Load a model again; the new version gets a share of the requests, or copies of them, until it is judged."""
        given = await parameters(request)
        model = self._model(request, given)
        shadow = truth(given, "shadow", False)
        share = _share(given.get("share", "100%" if shadow else "5%"))
        refuse_if_not_loaded(model)
        if shadow and model.loaded().on_demand is not None:
            raise BadParameterError("Parameter shadow is true; a model with a store of adapters gets no copies")
        self._drop_removed_models()
        before = self._trials.get(model)
        if before is not None and not before.is_over:
            raise ModelExistsError(f"A new version of model {model.label} is being tried already")
        trial = CanaryTrial(model, share, _rules(given), shadow, self._drain_timeout_s)
        self._trials[model] = trial
        model.notes["canary"] = trial.describe
        reload = asyncio.create_task(self._reload(trial))
        self._reloads.add(reload)
        reload.add_done_callback(self._forget)
        if not truth(given, "synchronous", True):
            return json_response({"status": "the new version is loading", "canary": trial.describe()}, 202)
        await asyncio.shield(reload)
        return json_response({"status": f"promoted: {trial.reason}", "canary": trial.describe()})

    async def promote(self, request: Request) -> Response:
        """Have the new version take the place of the old one, whatever the figures say."""
        return await self._decide(request, TrialVerdict.PROMOTED)

    async def take_back(self, request: Request) -> Response:
        """End the new version; the requests that it has finish there."""
        return await self._decide(request, TrialVerdict.TAKEN_BACK)

    async def _decide(self, request: Request, verdict: TrialVerdict) -> Response:
        model = self._model(request, request.query_params)
        trial = self._trials.get(model)
        if trial is None or trial.is_over:
            raise ModelNotFoundError(f"No new version of model {model.label} is being tried")
        trial.ask(verdict)
        await trial.over.wait()
        await model.until_reloaded()
        if trial.verdict is not verdict:
            raise ModelExistsError(f"The new version of model {model.label} is {trial.verdict.value}: {trial.reason}")
        return json_response({"status": trial.verdict.value, "canary": trial.describe()})

    async def _reload(self, trial: CanaryTrial) -> None:
        self._running.add(trial)
        try:
            await self._models.reload_model(trial.model, trial.prove)
        except LmiServerError as error:
            trial.fail(error)
            raise
        finally:
            self._running.discard(trial)
            if not trial.is_over:
                trial.fail(ModelNotFoundError("the model or the server has ended"))

    def _forget(self, reload: asyncio.Task[None]) -> None:
        """Look at the error, which the description of the trial tells: asyncio would log it."""
        self._reloads.discard(reload)
        if not reload.cancelled():
            reload.exception()

    def _model(self, request: Request, given: Mapping[str, str]) -> Model:
        return managed_model(self._models, request.path_params["model"], given.get("model_version"), "in the path")

    def _drop_removed_models(self) -> None:
        present = self._models.models
        self._trials = {model: trial for model, trial in self._trials.items() if model in present or not trial.is_over}

    def families(self) -> Iterator[Family]:
        """Yield the requests of both versions while a new one is tried, and after that until the next one."""
        share = GaugeMetricFamily(
            "lmi_canary_share", "Share of the requests, or copies, of a new version.", None, ["model"]
        )
        labels = ["model", "version", "outcome"]
        requests = CounterMetricFamily("lmi_canary_requests", "Requests since a new version is tried.", None, labels)
        latency = GaugeMetricFamily(
            "lmi_canary_latency_seconds", "Median latency, of a token or of an answer.", None, labels[:2]
        )
        self._drop_removed_models()
        for model, trial in self._trials.items():
            share.add_metric([model.label], trial.share if trial.verdict is TrialVerdict.RUNNING else 0.0)
            for version, figures in (("old", trial.old), ("new", trial.new)):
                total = figures.total
                requests.add_metric([model.label, version, "error"], total.errors)
                requests.add_metric([model.label, version, "refused"], total.refused)
                requests.add_metric([model.label, version, "success"], total.judging - total.errors)
                requests.add_metric([model.label, version, "uncounted"], figures.uncounted)
                if (found := figures.latency) is not None:
                    latency.add_metric([model.label, version], found.median)
        yield from (share, requests, latency)


def _share(text: str) -> float:
    """Return a share of 1 of "5%" or "5": percent. Below 1 it could be meant either way, and needs its sign.

    Raises BadParameterError.
    """
    given = text.strip()
    value = _number({"share": given.removesuffix("%")}, "share", 0.0, 100.0)
    if not value:
        raise BadParameterError("Parameter share is 0; it takes a percentage above 0, such as 5%")
    if value < 1 and not given.endswith("%"):
        raise BadParameterError(
            f'Parameter share is "{excerpt(given)}", and takes percent: send {value * 100:g}%, or {value:g}% if so few '
            "requests are meant"
        )
    return value / 100


def _rules(given: Mapping[str, str]) -> Rules:
    requests = integer(given, "requests", _REQUESTS)
    if not 1 <= requests <= 10**9:
        raise BadParameterError(f"Parameter requests is {requests}; it takes 1 or more")
    return Rules(
        requests,
        _number(given, "duration", _DURATION_S, _LONGEST_S),
        _number(given, "max_errors", _MAX_ERRORS, 100.0) / 100,
        _number(given, "max_slower", _MAX_SLOWER, 1e6),
        _number(given, "max_changed", _MAX_CHANGED, 100.0) / 100,
        _number(given, "max_shift", _MAX_SHIFT, _MAX_SHIFT),
        _number(given, "max_client", _MAX_CLIENT, 100.0) / 100,
    )


def _number(given: Mapping[str, str], name: str, default: float, highest: float) -> float:
    text: Any = given.get(name, "").strip() or default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= highest:  # and not NaN
        raise BadParameterError(f'Parameter {name} is "{excerpt(str(text))}"; it takes a number from 0 to {highest:g}')
    return value
