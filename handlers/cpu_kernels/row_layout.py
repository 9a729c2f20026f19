"""What the options of a model say of the kernels' rows: this module imports no numpy, which `check` can do without."""

SCALE_BYTES = 2
"""Behind each row of a KV cache in 8 bits: see attention/packed_rows.py."""
