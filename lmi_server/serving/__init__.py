"""The queue side of a model, in the front end's process: registry, job queue, worker pool, adapters, sessions."""
