"""The lmi-dist handler: LMI-Dist is no more, and vLLM serves its models, on ranks that mpirun starts."""

from __future__ import annotations

from handlers.vllm.handler import VllmHandler, import_engine
from handlers.vllm.lmi_dist_options import LmiDistOptions


class LmiDistHandler(VllmHandler):
    """Serves a model directory or name that vLLM can load, split over the ranks of an MPI group."""

    def follow(self, model_dir: str, options: LmiDistOptions) -> None:
        import_engine("engine_loading").follow(model_dir, options)
