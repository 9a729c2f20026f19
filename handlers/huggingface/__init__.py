"""Any transformers causal language model under the rolling batch."""
