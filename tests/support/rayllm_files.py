"""What the model files of several tests begin with."""

from __future__ import annotations

AUTOSCALING = """\
deployment_config:
  autoscaling_config:
    min_replicas: 1
    initial_replicas: 2
    max_replicas: 8
    target_num_ongoing_requests_per_replica: 24
    metrics_interval_s: 10.0
    look_back_period_s: 30
    smoothing_factor: 0.6
    downscale_delay_s: 300.0
    upscale_delay_s: 15.0
"""
"""The recommended values of RayLLM, by its own names."""
