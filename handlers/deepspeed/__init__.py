"""DeepSpeed: rolling batch and whole tasks, over one rank or more. DeepSpeed itself is imported when a model loads."""
