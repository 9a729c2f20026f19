"""The server process: binds the socket, registers the models, serves, and shuts down in stages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from frontend.access.management_access import Access
from frontend.access.web_pages import is_loopback
from frontend.app import App
from frontend.http.connection_limits import ConnectionLimits, map_large_blocks
from frontend.http.listeners import BACKLOG, Listener, listen
from frontend.http.protocol import RelayProtocol
from frontend.http.tls import Certificate, names_certificate
from frontend.lifecycle.ready_line import ready_line
from frontend.lifecycle.server_end import ForcedEnd, ServerEnd
from frontend.management.model_watch import ModelWatch
from frontend.observability.metrics.collector import Metrics
from frontend.observability.metrics.lmi_logs import AccessLog, MetricLog, log_files
from frontend.observability.metrics.recorded import HOST
from frontend.observability.request_reports import RequestReports
from frontend.observability.server_log import BackgroundLog, background_log
from frontend.relay.relay import Relay
from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.configuration.resolve import inspect_model
from lmi_server.configuration.server_settings import ServerSettings, server_home
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.metrics import Metric
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.machine.environment import process_environment, without_secrets_of_server
from lmi_server.machine.inventory import this_machine, with_gpu_memory
from lmi_server.processes.descriptors import open_standard_files
from lmi_server.processes.hidden_variables import keep_memory_private, parents_with_secrets
from lmi_server.serving.models.fetch_model import Inspect
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.supervisor.orphans import Orphans, kill_left

logger = logging.getLogger(__name__)

_TICKS_PER_S = 10  # of uvicorn
_FAILURE_CHECK_S = 0.5
# The usual thresholds (700, 10, 10) have the garbage collector run 27 times for 1,000 short requests, and find nothing:
# requests and connections that have ended leave no cycles.
_COLLECTED_AT = (50_000, 20, 50)
_LOG_CLOSE_S = 0.2  # for the last lines of the log, if the end is forced


def run(
    sources: Sequence[ModelSource],
    settings: ServerSettings,
    environment: Mapping[str, str],
    inspect: Inspect = inspect_model,
    registry: Callable[..., ModelRegistry] = ModelRegistry,
    access: Callable[[ServerSettings, Mapping[str, str]], Access] = Access.from_settings,
) -> int:
    """Serve the models of `sources` until SIGTERM or SIGINT; return the exit code.

    `environment` has the variables that configure models. `registry` makes what keeps them, `access` what
    says who may use them.

    The first signal drains the server: it accepts nothing more, and finishes what it has accepted within
    `drain_timeout` (exit code 0). The second signal ends everything at once (exit code 1). A model of `sources` that
    cannot be loaded drains the server too (exit code 1), unless `wait_model_loading` is false: the others are served
    then. With `fail_fast` a model of `sources` that fails later does the same.
    """
    SECRETS.add_named(process_environment())
    environment = without_secrets_of_server(environment)
    logging.getLogger().setLevel(settings.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    open_standard_files()
    if settings.holds_secrets:
        keep_memory_private()
    directory = None if settings.log_dir is None else server_home(environment, Path.cwd()) / settings.log_dir
    with background_log(sys.stderr.fileno(), settings.log_format) as log:
        try:
            with log_files(settings.written_logs, directory):
                return _run(sources, settings, environment, inspect, registry, access, log)
        except ConfigurationError as error:
            logger.error("%s", error)
            return 1


def _run(
    sources: Sequence[ModelSource],
    settings: ServerSettings,
    environment: Mapping[str, str],
    inspect: Inspect,
    registry: Callable[..., ModelRegistry],
    access: Callable[[ServerSettings, Mapping[str, str]], Access],
    log: BackgroundLog,
) -> int:
    listeners = listen(settings)
    certificate = Certificate(settings) if any(listener.tls for listener in listeners) else None
    if certificate is None and names_certificate(settings):
        logger.warning("the certificate has no effect, because no address begins with https:// (tls=true)")
    _allow_many_connections()
    map_large_blocks()
    try:
        server = _Server(sources, settings, listeners, certificate, environment, inspect, registry, access, log)
        try:
            code = uvloop.run(server.serve())
        finally:
            server.write_reports()
        # The end of the log may wait for its reader. The loop, which took signals, is gone and has left their handlers.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(1))
        server.note_end()
        return code
    finally:
        for listener in listeners:
            listener.close()


class _Server:
    """Everything that lives as long as the event loop."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        settings: ServerSettings,
        listeners: Sequence[Listener],
        certificate: Certificate | None,
        environment: Mapping[str, str],
        inspect: Inspect,
        registry: Callable[..., ModelRegistry],
        access: Callable[[ServerSettings, Mapping[str, str]], Access],
        log: BackgroundLog,
    ) -> None:
        self._sources = sources
        self._settings = settings
        self._listeners = listeners
        self._certificate = certificate
        self._log = log
        self._signals = 0
        self._ending = asyncio.Event()
        self._began = time.monotonic()
        logs = settings.written_logs
        self._access = access(settings, environment)
        self._metrics = Metrics(lambda: self._models.models, MetricLog(logs) if logs else None, settings.metric_names)
        self._reports: RequestReports | None = None
        self._orphans = Orphans()
        self._forced_end = ForcedEnd(settings.drain_timeout, self._before_forced_end)
        self._failed = False  # a model of the start could not be loaded
        artifacts = artifact_settings(settings.download_dir, environment, settings.unused_environments_gb)
        self._models = registry(
            environment, artifacts, inspect, settings.drain_timeout, settings.log_level.upper(), self._metrics.record
        )
        self._models.room.unloads_idle = settings.unload_idle_models

    def note_end(self) -> None:
        """Note that the event loop has ended."""
        self._forced_end.leave()

    def _before_forced_end(self) -> None:
        """Kill what this process has started, and write the log. It runs in another thread."""
        kill_left()
        self.write_reports()
        self._log.close(_LOG_CLOSE_S)

    def write_reports(self) -> None:
        """Write the waiting log lines of ended requests, however the server ends; the end of the loop ends the last."""
        if self._reports is not None:
            self._reports.flush()

    async def serve(self) -> int:
        """Serve until the end; return the exit code of the process."""
        models, metrics = self._models, self._metrics
        relay = Relay(models, metrics, self._settings, self._access)
        self._reports = relay.reports
        management_place = self._listeners[1].place if len(self._listeners) > 1 else None
        app = App(models, metrics, relay, self._settings, self._access, self._log.tail, management_place)
        logged = AccessLog(app) if "access" in self._settings.written_logs else app
        limits = ConnectionLimits(self._settings, metrics.for_model(None).count_refusal)
        http = _HttpServer(logged, limits, self._settings, self._listeners, self._certificate)
        self._listen_to_signals()
        self._orphans.start()
        serving = asyncio.create_task(http.serve([listener.socket for listener in self._listeners]))
        starting = [models.register(source, at_startup=True) for source in self._sources]
        watches = [asyncio.create_task(task) for task in self._watches(app, starting)]
        for listener, what in zip(self._listeners, ("", " for management"), strict=False):
            logger.info("listening on %s%s", listener.url, what)
        self._log_access()
        gc.freeze()  # the modules live as long as the process; the collector need not visit them each time
        gc.set_threshold(*_COLLECTED_AT)
        failed = await self._end_of_service(starting)
        self._forced_end.begin()
        for watch in watches:
            watch.cancel()
        logger.info("draining: up to %g seconds; a second signal ends at once", self._settings.drain_timeout)
        relay.draining = True
        await ServerEnd(self._settings.drain_timeout, models, app, http).run(serving, relay.reports.close)
        self._orphans.end()
        logger.info("stopped")
        self._forced_end.code = 1 if failed else 0
        return self._forced_end.code

    def _watches(self, app: App, starting: Sequence[Model]) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what goes on beside the service until its end."""
        yield self._measure_start(starting)
        yield from map(self._end_if_unloadable, starting)
        yield self._say_ready(starting, dict(feature.page for feature in app.features if feature.page is not None))
        yield self._models.follow()
        yield from chain.from_iterable(feature.tasks() for feature in app.features)
        if self._settings.reload_on_change:
            yield ModelWatch(self._models).run()
        yield from (ring.watch() for ring in self._access.key_rings)
        if self._certificate is not None:
            yield self._certificate.watch()

    def _log_access(self) -> None:
        """Say who may manage models, and warn of unsafe settings: a proxy without headers, parents with keys."""
        guard, listener = self._access.guard, self._listeners[-1]
        logger.info("models are managed by %s", guard.managers)
        for parent in parents_with_secrets():
            logger.warning(
                "%s has keys of the server among its variables, where models with code of their own can read them; "
                "give them in a file instead, such as api_keys_file",
                parent,
            )
        if guard.guesses_clients and listener.place.port is not None and not is_loopback(listener.place.host):
            logger.warning(
                "other machines reach %s, and no key is set: behind a proxy that adds no header, such as nginx by "
                "default, every client counts as one on this machine and may manage models; set api_keys and "
                "management_api_keys, or management_clients=local if there is no such proxy",
                listener.url,
            )

    async def _say_ready(self, models: Sequence[Model], pages: Mapping[str, str]) -> None:
        """Say that the server is ready, once every model of the start is loaded or cannot be."""
        await self._models.until_told()
        models = models or self._models.models
        for model in models:
            await model.settled.wait()
        if not self._ending.is_set():
            logger.info(ready_line(self._listeners, self._settings, models, pages))

    async def _end_if_unloadable(self, model: Model) -> None:
        """End the service if a model of the start cannot be loaded, unless the other models are to be served then."""
        await model.settled.wait()
        if model.failure is not None and self._settings.wait_model_loading:
            logger.error(
                "ending the server, because model %s could not be loaded; with --keep-going "
                "(wait_model_loading=false) it serves the other models",
                model.label,
            )
            self._failed = True
            self._ending.set()

    async def _end_of_service(self, starting: Sequence[Model]) -> bool:
        """Wait for a signal or a failure that ends the service; return whether it was a failure."""
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _FAILURE_CHECK_S if self._settings.fail_fast else None)
            # One that its rolling batch refuses may still be served in static batches: it is not settled.
            failed = [model.label for model in starting if model.settled.is_set() and model.failure is not None]
            if self._settings.fail_fast and failed:
                logger.error("model %s has failed, and fail_fast is set: ending the server", failed[0])
                return True
        return self._failed

    async def _measure_start(self, models: Sequence[Model]) -> None:
        """Record LMI's metrics of the start: when the process began, and when the last model was settled."""
        record = self._metrics.record_server
        record(Metric("DJLServingStart", "Count", 1, (("Version", version("lmi-server")),)))
        for model in models:
            await model.settled.wait()
            if model.failure is not None:
                record(Metric("ModelLoadingError", "Count", 1, (("Model", model.name),)))
        here = (("Host", HOST),)
        record(Metric("StartupLatency", "Microseconds", round((time.monotonic() - self._began) * 1e6), here))
        environment = process_environment()
        machine = await asyncio.to_thread(lambda: with_gpu_memory(this_machine(environment), environment))
        for number, gpu in enumerate(machine.gpus):
            if gpu.total_bytes is not None and gpu.free_bytes is not None:
                record(Metric(f"GPUMemory_{number}", "Bytes", gpu.total_bytes - gpu.free_bytes, here))

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._signals += 1
        self._ending.set()
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            self._models.kill()
            self._orphans.end()
            self.write_reports()
            self._log.close(_LOG_CLOSE_S)
            os._exit(1)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process without ending the workers."""

    def __init__(
        self,
        app: App | AccessLog,
        limits: ConnectionLimits,
        settings: ServerSettings,
        listeners: Sequence[Listener],
        certificate: Certificate | None,
    ) -> None:
        self._secured = [listener.socket for listener in listeners if listener.tls]
        self._context = None if certificate is None else certificate.context
        self._limits = limits
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=functools.partial(RelayProtocol, self._limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=math.ceil(settings.keep_alive_timeout),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the sockets, with TLS on some of them; uvicorn has one setting for all."""
        plain = [each for each in sockets or () if each not in self._secured]
        servers: list[asyncio.base_events.Server] = []
        for context, group in ((None, plain), (self._context, self._secured)):
            if group:
                self.config.ssl = context
                await super().startup(group)
                servers += self.servers
        self.servers = servers

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_S == 0:
            for connection in self._connections():
                connection.check()
            self._limits.check_files()
            self._limits.give_memory_back()
        return await super().on_tick(counter)

    def refuse_unfinished(self, message: str) -> None:
        """Refuse requests that have not arrived as a whole: they would be refused at their end."""
        for connection in self._connections():
            connection.refuse_unanswered(message, only_unfinished=True)

    def refuse_unanswered(self, message: str) -> None:
        """Refuse requests whose answers have not begun."""
        for connection in self._connections():
            connection.refuse_unanswered(message)

    def _connections(self) -> list[RelayProtocol]:
        return cast("list[RelayProtocol]", list(self.server_state.connections))

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _allow_many_connections() -> None:
    """Raise the limit on open files to the highest that this process may set: each client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
