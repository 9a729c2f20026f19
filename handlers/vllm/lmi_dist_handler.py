"""The lmi-dist handler: serves models configured for LMI-Dist with vLLM, on ranks that mpirun starts.

LMI-Dist, LMI's own engine under MPI, is no longer developed. Its configurations keep working.
"""

from __future__ import annotations

from handlers.vllm.handler import VllmHandler, import_engine
from handlers.vllm.lmi_dist_options import LmiDistOptions


class LmiDistHandler(VllmHandler):
    """Serves a model directory, or a Hugging Face id, that vLLM can load, split over the ranks of an MPI group."""

    def follow(self, model_dir: str, options: LmiDistOptions) -> None:
        import_engine("engine.loading").follow(model_dir, options)
