"""Any transformers causal language model under the rolling batch. Imports `rolling_batch/` and `checkpoints/`."""
