"""The KV cache in pages, for GPUs: blocks of tokens that sequences share, and attention that reads them in place."""
