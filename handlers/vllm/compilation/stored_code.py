"""The code that vLLM compiles for a model on the CPU: where it is stored, and how a running model changes over to it.

vLLM runs its own Python code, operation by operation, or code that torch compiles for the whole model ahead of time
(AOT). Compiling takes a minute or more on the CPU. vLLM stores the result below VLLM_CACHE_ROOT, under a hash of the
configuration, the model's class and the environment. At the first forward pass it asks `_try_load_aot_compiled_fn` of
vllm.compilation.decorators for the stored code, and keeps it in the model's attribute `aot_compiled_fn`. If there is
none, it compiles now, while every request waits.

This module replaces that function: without stored code the replacement returns the model's uncompiled `forward`, which
vLLM keeps and calls like compiled code. Meanwhile another process compiles and stores the file (`background.py`). Then
one assignment to `aot_compiled_fn` hands over between two forward passes. Both kinds of code take weights and KV cache
from the same module.
"""

from __future__ import annotations

import copy
import functools
import logging
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from vllm.compilation import decorators
from vllm.config import set_current_vllm_config

from handlers.checkpoints.contents import contents_digest
from handlers.vllm import library

logger = logging.getLogger(__name__)


class UncompiledModel:
    """A model that runs its uncompiled code; `path` is the file in which vLLM looks for its compiled code."""

    def __init__(self, module: Any, path: Path) -> None:
        self.path = path
        self._module = module

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._module.parameters())

    def use_compiled(self) -> bool:
        """Run the stored code from the next step on. Returns False if there is none that can be used.

        Any thread may call it: the assignment is atomic.
        """
        compiled = _stored_code(self._module, self.path)
        if compiled is not None:
            self._module.aot_compiled_fn = compiled
        return compiled is not None


def use_stored_code(config: Any) -> None:
    """Let this process' models of `config` run stored code; vLLM compiles at start if there is none.

    vLLM 0.32 would do the same if it could: on the CPU it stores compiled code but fails to load it, because the
    functions that its CPU compiler makes lack the method `finalize_loading`.
    """
    _configure_compilation(config)
    _replace_loader(lambda module, path: _stored_code(module, Path(path)))


def serve_before_compiled(config: Any) -> list[UncompiledModel]:
    """Let this process' models of `config` run stored code, or their uncompiled code if there is none.

    Returns a list that each model without stored code joins at its first forward pass.
    """
    _configure_compilation(config)
    uncompiled: list[UncompiledModel] = []

    def stored_or_uncompiled(module: Any, path: str) -> Callable[..., Any]:
        compiled = _stored_code(module, Path(path))
        if compiled is not None:
            return compiled
        uncompiled.append(UncompiledModel(module, Path(path)))
        # Of the class, not of the instance: vLLM passes the module itself as the first argument.
        return type(module).forward  # type: ignore[no-any-return]

    if _replace_loader(stored_or_uncompiled):
        disable_compilation()
    return uncompiled


def disable_compilation() -> None:
    """Keep this process from compiling anything.

    Apart from the model, vLLM compiles functions of its sampler on their first use: seconds in the middle of a request.
    """
    torch._dynamo.config.disable = True


def can_store_code() -> bool:
    """Return whether vLLM can write compiled code to its cache directory; if not, it fails to compile any model."""
    directory = Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError as error:
        logger.warning("the model runs uncompiled, VLLM_CACHE_ROOT cannot be written: %s", error)
        return False


def compile_models(arguments: Mapping[str, Any]) -> None:
    """Compile the models of an engine that serves with `serve_before_compiled`, and store their code.

    `arguments` are those of the engine. The environment must be that of the serving process before it made its
    configuration: both are part of the hash that names the file, and vLLM writes into the environment as it makes a
    configuration. The KV cache is as small as vLLM accepts, because nothing is served from it.
    """
    config = library.AsyncEngineArgs(**arguments).create_engine_config()
    use_stored_code(config)
    config.cache_config.kv_cache_memory_bytes = library.min_kv_bytes(config)
    library.in_process_engine(config, [])


def _replace_loader(load: Callable[[Any, str], Callable[..., Any] | None]) -> bool:
    """Replace vLLM's function for loading stored code by `load`, which gets the module and the path of the file.

    Returns False, and changes nothing, if this vLLM has no such function or is configured not to store code. It then
    compiles when the model starts.
    """
    name = "_try_load_aot_compiled_fn"
    if not hasattr(decorators, name) or not envs.VLLM_USE_AOT_COMPILE or envs.VLLM_DISABLE_COMPILE_CACHE:
        logger.warning(
            "vLLM %s stores no compiled code here, or in a way that is not known; it compiles now", library.version()
        )
        return False
    setattr(decorators, name, load)
    return True


def _stored_code(module: Any, path: Path) -> Callable[..., Any] | None:
    if not path.exists():
        return None
    # The border to whatever another version of torch or vLLM has stored: any error means that it is of no use.
    try:
        with set_current_vllm_config(module.vllm_config), path.open("rb") as file:
            compiled = torch.compiler.load_compiled_function(file, f_globals=module.forward.__globals__)
        decorators._verify_source_unchanged(compiled.source_info(), module.vllm_config)
    except Exception as error:  # noqa: BLE001
        logger.warning("the compiled code in %s cannot be used: %s", path, error)
        return None
    if not module.compilation_config.dynamic_shapes_config.evaluate_guards:
        compiled.disable_guard_check()
    return compiled  # type: ignore[no-any-return]


def _configure_compilation(config: Any) -> None:
    """Make compiled and uncompiled code share one configuration, and tell kinds of CPU apart.

    vLLM configures operations for one of the two: with a compiler it leaves them as plain code ("none"), which the
    compiler fuses, and without it selects its own kernels ("all"). Uncompiled code needs the kernels, and compiled
    code is as fast with them.

    The name of stored code does not depend on the CPU that it was compiled for. On a shared cache directory another
    machine would load code with instructions that it lacks, so the instruction sets become part of the hash. It does
    depend on the place of the model: a moved model directory would be compiled again: its contents take the place of
    the path.
    """
    compilation = config.compilation_config
    compilation.custom_ops = ["all" if name == "none" else name for name in compilation.custom_ops]
    if isinstance(config.additional_config, dict):
        config.additional_config = {**config.additional_config, "cpu": _instruction_sets()}
    model = config.model_config
    if Path(model.model).is_dir():
        model.compute_hash = functools.partial(_hash_of_contents, model, contents_digest(Path(model.model)))


def _hash_of_contents(model: Any, digest: str) -> str:
    """Return vLLM's hash of the configuration of a model, with the digest of its files in the place of their path."""
    unplaced = copy.copy(model)
    for name, value in vars(model).items():
        if value == model.model:
            setattr(unplaced, name, digest)
    return str(type(model).compute_hash(unplaced))


def _instruction_sets() -> str:
    """Return the architecture and the instruction sets of this machine's first core."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags.partition(':')[2].strip()}"
