"""The way of a request to a worker: the job queue, the choice of the worker, batches, retries, and the quarantine."""
