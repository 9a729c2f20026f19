"""The KV cache in pages, for GPUs: blocks of tokens shared by sequences, and attention that reads them in place."""
