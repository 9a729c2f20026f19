"""A model in Ray Serve LLM, with one replica of vLLM on the CPU. Needs vLLM for CPUs, and pyarrow."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    port, directory, model = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # Ray asks for a token otherwise, and gives its processes a niceness of 15. The cache is for vLLM, in GiB.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=directory)
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": int(port)},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        config = LLMConfig(
            model_loading_config={"model_id": "model", "model_source": model},
            accelerator_config={"kind": "cpu"},
            deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
            # On a CPU the share is of the main memory; Ray's default of 0.92 is more than is free.
            engine_kwargs={"dtype": "bfloat16", "max_model_len": 512, "gpu_memory_utilization": 0.1},
        )
        serve.run(build_openai_app({"llm_configs": [config]}))
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()
