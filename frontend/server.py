"""The server process: binds the socket, starts the pools, serves, and shuts down in stages."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Generator, Sequence

import uvicorn
import uvloop

from frontend.app import App
from frontend.http_protocol import RelayProtocol
from frontend.inference import Relay
from frontend.metrics import Metrics
from frontend.models import ServedModels
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.configuration.server import ServerSettings
from lmi_server.protocol import Load
from lmi_server.worker_pool import PoolSettings, WorkerPool

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_KEEP_ALIVE_S = 75  # longer than the 60 seconds of common load balancers, so that they are the ones to close
_CLIENT_GRACE_S = 5.0  # after the drain: for clients to read the last bytes of their answers


def run(models: Sequence[ResolvedModel], settings: ServerSettings) -> int:
    """Serve `models` until SIGTERM or SIGINT; return the exit code.

    The first signal drains: nothing more is accepted, what was accepted finishes within `drain_timeout` (exit code 0).
    The second ends everything at once (exit code 1).
    """
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        listener = _bind(settings.host, settings.port)
    except OSError as error:
        logger.error("cannot listen on %s port %d: %s", settings.host, settings.port, error.strerror)
        return 1
    _allow_many_connections()
    return uvloop.run(_Server(models, settings, listener).serve())


class _Server:
    """Everything that lives as long as the event loop."""

    def __init__(self, models: Sequence[ResolvedModel], settings: ServerSettings, listener: socket.socket) -> None:
        self._models = models
        self._settings = settings
        self._listener = listener
        self._signals = 0
        self._signalled = asyncio.Event()
        self._pools: list[WorkerPool] = []

    async def serve(self) -> int:
        self._pools = [WorkerPool(pool_settings(model, self._settings)) for model in self._models]
        names = [model.served_names for model in self._models]
        models = ServedModels(list(zip(self._pools, names, strict=True)))
        metrics = Metrics(self._pools)
        relay = Relay(models, metrics, self._settings.max_request_size, self._settings.request_id_header)
        http = _HttpServer(App(models, metrics, relay), self._settings)
        self._listen_to_signals()
        serving = asyncio.create_task(http.serve([self._listener]))
        for pool in self._pools:
            pool.start()
        host, port = self._listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        gc.freeze()
        await self._signalled.wait()
        logger.info("draining: up to %g seconds; a second signal ends at once", self._settings.drain_timeout)
        relay.draining = True
        http.should_exit = True
        await asyncio.gather(*(pool.drain(self._settings.drain_timeout) for pool in self._pools))
        await serving
        await asyncio.gather(*(pool.stop() for pool in self._pools))
        logger.info("stopped")
        return 0

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._signals += 1
        self._signalled.set()
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            for pool in self._pools:
                pool.kill()
            logging.shutdown()
            os._exit(1)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which knows of no worker."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=RelayProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(settings.drain_timeout + _CLIENT_GRACE_S),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def pool_settings(model: ResolvedModel, settings: ServerSettings) -> PoolSettings:
    """Return what the pool of `model` needs of its configuration."""
    return PoolSettings(
        load=Load(
            model_name=model.name,
            model_dir=model.model_dir,
            handler=model.handler,
            options=model.raw_options(),
            served_names=list(model.served_names),
            log_level=settings.log_level.upper(),
        ),
        workers=model.serving.min_workers,
        max_in_flight=model.options.max_rolling_batch_size,
        job_queue_size=model.serving.job_queue_size,
        model_loading_timeout_s=model.options.model_loading_timeout,
        parallel_loading=model.options.parallel_loading,
    )


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _allow_many_connections() -> None:
    """Raise the limit on open files to what this process may have: each client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
