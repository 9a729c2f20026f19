"""The counters, and their formats.

`catalogue.py` is the table of what is counted, with its names in each format. `model_metrics.py` counts the requests
of a model (percentiles: `quantile_sketch.py`), and `recorded.py` keeps what models print. `collector.py` answers
`/metrics`: `spellings.py` makes the families, `exposition.py` writes them. `embedded_metrics.py` writes CloudWatch's
lines, and `lmi_logs.py` the three logs of DJL Serving.
"""
