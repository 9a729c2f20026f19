"""Prints the signatures of optimum-neuron that the neuronx handler calls, as JSON, for the tests of the handler.

optimum-neuron needs an older transformers than the rest of the project, so that the tests do not install it. It runs in
an environment of its own, and needs no Neuron device:

    pip install --no-deps optimum-neuron==0.4.5 optimum==2.0.0 transformers==4.57.1 tokenizers==0.22.1 \
        huggingface_hub==0.36.0
    python scripts/optimum_neuron_signatures.py > tests/data/optimum_neuron_signatures.json

What can be imported without Neuron's own packages is inspected, the rest is read from the source.
"""

from __future__ import annotations

import ast
import inspect
import json
from importlib.metadata import version
from pathlib import Path

import optimum.neuron
from optimum.neuron import NeuronModelForCausalLM
from optimum.neuron.models.inference.backend.config import NxDNeuronConfig

_BACKEND = Path(optimum.neuron.__file__).parent / "models/inference/backend"
_SOURCES = {
    "NxDModelForCausalLM.forward": "modules/decoder/modeling_decoder.py",
    "NxDPreTrainedModel._export": "pretrained_model.py",
    "NxDPreTrainedModel._from_pretrained": "pretrained_model.py",
}


def of_source(name: str, path: str) -> list[str]:
    """Return the parameters of a method, "Class.method", from the source."""
    class_name, _, method = name.partition(".")
    tree = ast.parse((_BACKEND / path).read_text(encoding="utf-8"))
    owner = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name)
    found = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return [argument.arg for argument in found.args.args if argument.arg not in ("self", "cls")]


def live(function: object) -> list[str]:
    """Return the parameters of a function or class that can be imported."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")]


print(
    json.dumps(
        {
            "version": version("optimum-neuron"),
            "NxDNeuronConfig": live(NxDNeuronConfig.__init__),
            **{
                f"NeuronModelForCausalLM.{name}": live(getattr(NeuronModelForCausalLM, name))
                for name in ("from_pretrained", "get_neuron_config", "export", "save_pretrained")
            },
            **{name: of_source(name, path) for name, path in _SOURCES.items()},
        },
        indent=1,
    )
)
