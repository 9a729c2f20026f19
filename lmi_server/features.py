"""The table of optional features: what the server, its settings and its command line have beside the core.

An entry names everything of its feature as "module:name", which is imported late. The core does not know any feature by
name: it goes through this table. To remove a feature, delete its modules and its entry; to add one, write both. This
module imports nothing of the project, so that every folder may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One feature; whatever it does not have is left empty.

    - `settings`: classes derived from FeatureSettings, whose keys the settings of the server get.
    - `dialect`: an OptionalDialect, by which requests of another API are read.
    - `server`: a function that takes ServerParts, and returns the ServerFeature of one server (frontend/features.py).
    - `commands`: for each command of `lmi-server` its function, or its Typer if it has commands of its own. One
      with the name of a command of the core takes its place.
    """

    name: str
    settings: tuple[str, ...] = ()
    dialect: str = ""
    server: str = ""
    commands: Mapping[str, str] = field(default_factory=dict)


FEATURES = (
    FeatureSpec(
        name="capture",
        settings=("frontend.capture.settings:CaptureSettings",),
        server="frontend.capture.feature:attach",
    ),
    FeatureSpec(
        name="sagemaker",
        settings=("frontend.sagemaker.settings:SignatureSettings", "frontend.sagemaker.settings:JobSettings"),
        server="frontend.sagemaker.feature:attach",
    ),
    FeatureSpec(
        name="batches",
        settings=("frontend.batches.settings:BatchSettings",),
        server="frontend.batches.feature:attach",
        commands={"run-batch": "lmi_server.batches.command:run_batch"},
    ),
    FeatureSpec(
        name="stored_responses",
        settings=("frontend.stored_responses.settings:ResponseSettings",),
        server="frontend.stored_responses.feature:attach",
    ),
    FeatureSpec(
        name="kserve",
        dialect="lmi_server.dialects.kserve:DIALECT",
        server="frontend.kserve.predictions:attach",
    ),
    FeatureSpec(
        name="tgi",
        dialect="lmi_server.dialects.tgi:DIALECT",
        server="frontend.tgi.info:attach",
    ),
    FeatureSpec(
        name="anthropic",
        dialect="lmi_server.dialects.anthropic:DIALECT",
    ),
    FeatureSpec(
        name="speech",
        dialect="lmi_server.dialects.speech:DIALECT",
    ),
    FeatureSpec(
        name="vllm_calls",
        settings=("frontend.vllm_calls.settings:SleepSettings",),
        server="frontend.vllm_calls.feature:attach",
    ),
    FeatureSpec(
        name="console",
        settings=("frontend.console.settings:ConsoleSettings",),
        server="frontend.console.feature:attach",
    ),
    FeatureSpec(
        name="traces",
        settings=("frontend.observability.traces.settings:TraceSettings",),
        server="frontend.observability.traces.feature:attach",
    ),
    FeatureSpec(
        name="emf",
        settings=("frontend.emf.settings:EmbeddedMetricsSettings",),
        server="frontend.emf.feature:attach",
    ),
    FeatureSpec(
        name="ray",
        commands={"ray": "lmi_server.ray.command:app", "recommend": "lmi_server.ray.recommendation.command:recommend"},
    ),
    FeatureSpec(
        name="route",
        server="frontend.route.feature:attach",
        commands={"route": "frontend.route.command:route"},
    ),
    FeatureSpec(
        name="bench",
        commands={"bench": "lmi_server.bench.command:bench"},
    ),
    # These measure with what bench measures with.
    FeatureSpec(
        name="verify",
        commands={"verify": "lmi_server.verify.command:verify"},
    ),
    FeatureSpec(
        name="canary",
        server="frontend.canary.feature:attach",
        commands={"reload": "lmi_server.canary.command:reload_model"},
    ),
    FeatureSpec(
        name="tune",
        commands={"tune": "lmi_server.tune.command:tune"},
    ),
    FeatureSpec(
        name="advise",
        commands={"advise": "lmi_server.advise.command:advise_server"},
    ),
    FeatureSpec(
        name="schema",
        commands={"schema": "lmi_server.schema.command:schema"},
    ),
    FeatureSpec(
        name="lsp",
        commands={"lsp": "lmi_server.lsp.command:lsp"},
    ),
    FeatureSpec(
        name="migrate",
        commands={"migrate": "lmi_server.migrate.command:migrate"},
    ),
)


def load(path: str) -> object:
    """Import the module of "module:name" and return its attribute `name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
