"""Configuration, job queue, worker processes, protocol, dialects and the command line of the model server."""
