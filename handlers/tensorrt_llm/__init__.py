"""TensorRT-LLM: options only, for `explain` and `check` to validate. There is no handler yet."""
