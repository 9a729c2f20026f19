"""What the server asks about the engine of a model, beside the values of its keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from lmi_server.configuration.handlers import HandlerSpec, load
from lmi_server.configuration.options import ModelOptions
from lmi_server.machine.inventory import Machine

_AnyOptions = TypeVar("_AnyOptions", bound=ModelOptions, covariant=True)


class EngineMemory(Generic[_AnyOptions]):
    """What an engine takes of the memory beside the weights. A subclass says what differs."""

    def __init__(self, options: _AnyOptions) -> None:
        self.options = options

    def max_running(self) -> int:
        """Return how many requests the engine has room for at a time."""
        return self.options.max_rolling_batch_size

    def kv_row_bytes(self, elements: int, width: int) -> int:
        """Return the bytes of the key or value of a head and token, `elements` of a model whose own take `width`."""
        return elements * width

    def reserved_kv_bytes(self, wanted: int, minimum: int, available: int) -> int | None:
        """Return the bytes of KV cache that a worker without GPU reserves; None if it allocates them on demand.

        All arguments are in bytes: `wanted` holds max_rolling_batch_size sequences of full length, `minimum` holds one,
        and `available` is the free memory.
        """
        return None

    def image_bytes(self, config: Mapping[str, Any]) -> int | None:
        """Return what a worker keeps of encoded images at most; None if the model of this config.json reads none."""
        return None


class EngineDescription(Generic[_AnyOptions]):
    """An engine with the options of one model. A subclass, named by `HandlerSpec.description`, says what differs.

    `variables` are those of its workers, if they do not depend on the options. `socket_directory` is the variable that
    says where the engine makes Unix sockets, "" if there is none; each worker gets a directory of its own.
    """

    memory_type: type[EngineMemory[Any]] = EngineMemory
    variables: Mapping[str, str] = {}
    socket_directory: str = ""

    def __init__(self, spec: HandlerSpec, options: _AnyOptions) -> None:
        self.spec = spec
        self.options = options

    @classmethod
    def recommend(cls, machine: Machine) -> Mapping[str, str]:
        """Return the recommended raw values for `machine`, by key in full; they apply to keys that no layer sets."""
        return {}

    @classmethod
    def argument_names(cls) -> frozenset[str]:
        """Return the undeclared names (without "option.") that the engine takes; their values are passed on to it."""
        return frozenset()

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the Python packages that must be installed."""
        return self.spec.engines

    @property
    def install_command(self) -> str:
        """Return the command that installs the packages."""
        return self.spec.installed_by

    def distribution(self, machine: Machine) -> str:
        """Return the package that option.engine_version is a version of, as an index has it; "" if there is none."""
        return self.spec.distribution

    def extras(self, machine: Machine) -> tuple[str, ...]:
        """Return the extras of this project that install the engine on `machine`."""
        return self.spec.extras

    def overrides(self, machine: Machine) -> tuple[str, ...]:
        """Return the requirements that take the place of what packages of the engine demand."""
        return ()

    @property
    def device(self) -> str:
        """Return the kind of device that must be there, "" for any."""
        return self.spec.device

    @property
    def memory(self) -> EngineMemory[ModelOptions]:
        """Return what the engine takes of the memory beside the weights."""
        return self.memory_type(self.options)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether a worker keeps what it computed for the beginnings of prompts, so that others need not again."""
        return False

    def worker_environment(self) -> Mapping[str, str]:
        """Return environment variables for the worker; the environment of the server overrides them."""
        return self.variables

    def gpus_per_worker(self, available: int) -> int | None:
        """Return how many of the `available` GPUs one worker takes, None for all; without GPUs, ranks share the CPU."""
        runs_on_cpu = self.options.ranks is not None or self.spec.degree_without_gpus != "devices"
        return self.options.devices_per_worker if available or not runs_on_cpu else None

    def devices_per_worker(self, machine: Machine) -> int:
        """Return how many devices one worker takes, at least 1; the ranks of a group share the CPU as its devices."""
        if not machine.gpus and self.options.ranks is None and self.spec.degree_without_gpus == "nothing":
            return 1
        return self.options.devices_per_worker or max(1, len(machine.gpus))

    def division(self, gpus: int) -> str | None:
        """Return in words how a worker with so many GPUs divides the model, for `explain`; None if it does not."""
        ranks = self.options.ranks or 1
        return f"each of {ranks} ranks under mpirun has its part of every layer" if ranks > 1 else None

    def notes(self, model_dir: Path, location: Path) -> Mapping[str, str]:
        """Return what values such as `auto` mean for the model at `location`, by key in full, for `explain`."""
        return {}

    def without_effect(self, machine: Machine) -> Iterator[tuple[str, Collection[str]]]:
        """Yield what the configuration or `machine` lacks, and the keys, without "option.", that are useless then."""
        yield from ()

    def checkpoint_problem(self, location: Path, config: Mapping[str, Any], on_gpus: bool) -> tuple[str, str] | None:
        """Return a key in full whose value does not fit the files at `location`, and why; None if there is none.

        `config` is the model's config.json, or empty; the location may be on another machine. `on_gpus`: workers have
        GPUs.
        """
        return None

    def partition(self, config: Mapping[str, Any]) -> Mapping[str, str | None] | str:
        """Return the changes of `lmi-server partition` to serving.properties, by key in full; None removes a key.

        `config` is the model's config.json, or empty. Returns a text with the reason if nothing can be split or
        quantised ahead of time.
        """
        return "the handler does neither; serve the model as it is"

    def is_plain_checkpoint(self, directory: Path) -> bool:
        """Return whether `check` can look for faults in the files of `directory`: weights that are not compiled."""
        return True


def without_keys(*names: str) -> dict[str, str | None]:
    """Return the changes that remove these keys, named without "option."."""
    return {f"option.{name}": None for name in names}


def load_engine_type(spec: HandlerSpec) -> type[EngineDescription[ModelOptions]]:
    """Import the description of the engine of `spec`."""
    if spec.description is None:
        return EngineDescription
    return cast("type[EngineDescription[ModelOptions]]", load(spec.description))


def describe_engine(spec: HandlerSpec, options: ModelOptions) -> EngineDescription[ModelOptions]:
    """Return the engine of `spec` with these options."""
    return load_engine_type(spec)(spec, options)
