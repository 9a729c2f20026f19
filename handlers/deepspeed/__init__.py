"""What the deepspeed handlers do with DeepSpeed and torch; importing its modules imports torch, not DeepSpeed."""
