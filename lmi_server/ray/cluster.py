"""A cluster of Ray: joined, or started on this machine; deployed to, and asked how it is."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.environment import set_variables
from lmi_server.ray.application import INGRESS, IngressSettings, application
from lmi_server.ray.deployments.deployment import APPLICATION, Deployment

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

ADDRESS = "RAY_ADDRESS"
EVERYWHERE = ("0.0.0.0", "::")

_ENDING = (signal.SIGTERM, signal.SIGINT)
_THIS_MACHINE = ("127.0.0.1", "localhost")
_CONNECT_S = 10.0
_POLL_S = 5.0
_ANSWER_S = 60.0
_TOKEN_REMEDY = "if the cluster was started without a token, set RAY_AUTH_MODE=disabled"
_LOCAL: Mapping[str, Any] = {
    "address": "local",
    # Ten processes with 900 MiB, which nothing here asks, and whose start may take Ray beyond its limits.
    "include_dashboard": False,
    "log_to_driver": True,
    # By themselves, the processes that Ray starts give way to all others (a niceness of 15).
    "_system_config": {"worker_niceness": 0},
}
# Ray's processes work all the time, and take that time from the models. Without a dashboard nothing reads what they
# collect.
_LOCAL_VARIABLES: Mapping[str, str] = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "0",  # with each call by a handle; these are rare
    "RAY_task_events_report_interval_ms": "0",  # never
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
_NO_MAIN_THREAD = "SIGTERM handler is not set"  # what Ray warns of; this module has a handler
_NO_ANSWER = (RayError, RayServeException, TimeoutError)


def deploy(models: Sequence[Deployment], settings: IngressSettings, environment: Mapping[str, str]) -> Iterator[str]:
    """Deploy `models` on the cluster that RAY_ADDRESS names; yield lines about it.

    Without RAY_ADDRESS a local cluster is started, which lives until SIGTERM or SIGINT. Raises ConfigurationError, also
    if a signal ends the wait for a cluster that has been joined.
    """
    woken = SimpleQueue[int | None]()
    _listen_to_signals(woken)
    # In the main thread, Ray has SIGTERM end the process before it knows the processes that it has started.
    address = _begin(lambda: _join(environment)).result()
    _listen_to_signals(woken)  # again: Ray has handlers that abort the process
    if woken.empty():
        yield from _until_signal(models, settings, address is not None, woken)
    elif address is not None:
        raise ConfigurationError("a signal has ended this command; nothing is deployed")
    if address is None:
        _end_local()


def _until_signal(
    models: Sequence[Deployment], settings: IngressSettings, is_joined: bool, woken: SimpleQueue[int | None]
) -> Iterator[str]:
    """Deploy `models`; return once they are served by a cluster that has been joined, or at a signal."""
    deployed = _begin(lambda: _deploy(models, settings, is_joined))
    deployed.add_done_callback(lambda _: woken.put(None))
    if woken.get() is None:
        yield _serving_line(models, settings, deployed)
        if not is_joined:
            yield "this process keeps the cluster; SIGTERM or SIGINT ends it"
            woken.get()
    elif is_joined:
        raise ConfigurationError(
            "a signal has ended this command, and not the deployment; lmi-server ray status shows how it goes on"
        )


def _end_local() -> None:
    """End the cluster of this process; a second signal ends the process at once, and the cluster with it."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    try:
        serve.shutdown()
    except (RuntimeError, ValueError, *_NO_ANSWER) as error:  # its controller may be too busy to answer in time
        logger.warning("Ray Serve has not shut down in order, and ends with the cluster: %s", _one_line(error))
    ray.shutdown()


def _listen_to_signals(received: SimpleQueue[int | None]) -> None:
    for number in _ENDING:
        signal.signal(number, lambda number, _: received.put(number))


def _begin(work: Callable[[], _Result]) -> Future[_Result]:
    """Begin to do `work` in a thread, for which the interpreter does not wait when it ends.

    The thread stays: processes of Ray end with the thread that has started them (PR_SET_PDEATHSIG).
    """
    result = Future[_Result]()

    def do() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
            result.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=do, name="deploy", daemon=True).start()
    return result


def _deploy(models: Sequence[Deployment], settings: IngressSettings, is_joined: bool) -> Mapping[str, Any]:
    """Deploy `models`; return what the front end says of itself."""
    # The front ends of this project take the requests; Ray's proxies would only take a port.
    serve.start(proxy_location="Disabled")
    with _messages_of_ray() if is_joined else contextlib.nullcontext():
        serve.run(application(models, settings), name=APPLICATION, route_prefix=None)
    return _front_end()


def _front_end() -> Mapping[str, Any]:
    """Return what the front end says of itself. Raises TimeoutError if it does not answer.

    With RAY_AUTH_MODE=token this process takes no answer of a cluster whose processes send no token, and Ray waits for
    one without an end.
    """
    try:
        answer = serve.get_deployment_handle(INGRESS, APPLICATION).remote().result(timeout_s=_ANSWER_S)
    except TimeoutError as error:
        raise TimeoutError(
            f"the front end has not said in {_ANSWER_S:.0f} s where it listens; {_TOKEN_REMEDY}"
        ) from error
    assert isinstance(answer, Mapping), "the front end answers with its address"
    return answer


def _serving_line(models: Sequence[Deployment], settings: IngressSettings, deployed: Future[Mapping[str, Any]]) -> str:
    """Return the line about the served models and their address. Raises ConfigurationError if nothing is."""
    try:
        front_end = deployed.result()
    except (RuntimeError, ValueError, *_NO_ANSWER) as error:
        reasons = "; ".join([_one_line(error), *_messages()])
        raise ConfigurationError(f"the models cannot be deployed: {reasons}") from error
    host = front_end["host"] if settings.host in EVERYWHERE else settings.host
    return f"serving {', '.join(model.model_id for model in models)} on http://{host}:{front_end['port']}"


@contextlib.contextmanager
def _messages_of_ray() -> Iterator[None]:
    """Log what Ray says of deployments while the block waits for them, each text once.

    Of a local cluster Ray itself prints the log of its controller.
    """
    done = threading.Event()
    threading.Thread(target=_log_messages, args=(done,), name="messages", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _log_messages(done: threading.Event) -> None:
    logged: set[str] = set()
    while not done.wait(_POLL_S):
        for message in _messages():
            if message not in logged:
                logged.add(message)
                logger.warning("%s", message)


def _messages() -> list[str]:
    """Return what Ray says of each deployment; empty if Ray does not answer (the caller times out)."""
    with contextlib.suppress(*_NO_ANSWER):
        found = serve.status().applications.get(APPLICATION)
        said = {} if found is None else {name: each.message for name, each in found.deployments.items()}
        return [f"{name}: {shorten(message)}" for name, message in said.items() if message]
    return []


def shorten(message: str) -> str:
    """Return a message of Ray Serve as one line: of the traceback of a replica, only its last line."""
    text, _, traceback = message.partition(" Error:")
    reasons = [line.strip() for line in traceback.splitlines() if line.strip()]
    return _one_line(" ".join([text, *(reason.removeprefix("RuntimeError: ") for reason in reasons[-1:])]))


def status(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return how the application is: its state, its front ends, and the replicas of each model.

    Raises ConfigurationError if there is no cluster, or nothing is deployed on it.
    """
    if not environment.get(ADDRESS):
        raise ConfigurationError(f"{ADDRESS} is not set; set it to the address of the cluster, or to auto")
    _join(environment)
    try:
        found = serve.status().applications.get(APPLICATION)
    except _NO_ANSWER as error:
        raise ConfigurationError(
            f"{ADDRESS} = {environment[ADDRESS]}: Ray Serve does not answer; {_one_line(error)}"
        ) from error
    if found is None:
        raise ConfigurationError("nothing is deployed on the cluster; run lmi-server ray deploy")
    return {
        "status": found.status.value,
        **({"message": found.message} if found.message else {}),
        "deployments": {
            name: {
                "status": deployment.status.value,
                "replicas": dict(deployment.replica_states),
                **({"message": deployment.message} if deployment.message else {}),
            }
            for name, deployment in found.deployments.items()
        },
    }


def _join(environment: Mapping[str, str]) -> str | None:
    """Join the cluster at RAY_ADDRESS, and return this address; start a cluster and return None if it is not set.

    Raises ConfigurationError if the cluster cannot be joined or started.
    """
    address = environment.get(ADDRESS) or None
    if address is None:
        set_variables({name: value for name, value in _LOCAL_VARIABLES.items() if name not in environment})
    else:
        _refuse_if_silent(address)
    logging.getLogger("ray._private.worker").addFilter(lambda record: _NO_MAIN_THREAD not in record.getMessage())
    try:
        ray.init(
            namespace="lmi-server", **(_LOCAL if address is None else {"address": address, "log_to_driver": False})
        )
    except Exception as error:  # Ray raises no narrower class if a node or its dashboard does not start in time
        raise ConfigurationError(_why_none(address, error)) from error
    return address


def _refuse_if_silent(address: str) -> None:
    """Raise ConfigurationError if nothing listens at `host:port`, which Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdecimal()):
        return  # auto, or one that Ray judges at once
    host = ray.util.get_node_ip_address() if host in _THIS_MACHINE else host.strip("[]")  # as Ray reads it
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"{ADDRESS} = {address}: no cluster listens there ({error}); set it to the address that ray start --head"
            " printed, or to auto for the cluster of this machine"
        ) from error


def _why_none(address: str | None, error: Exception) -> str:
    reason = _one_line(error)
    if address is not None:
        return (
            f"{ADDRESS} = {address}: the cluster cannot be joined; {reason}. If it asks for a token, set"
            " RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that has it"
        )
    return (
        f"no cluster of Ray can be started on this machine; {reason.rstrip('.')}. Ray gives a node half a minute, which"
        f" a busy machine may exceed: try again, or run ray start --head first and set {ADDRESS}=auto"
    )


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
