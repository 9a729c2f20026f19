"""The start of a worker: as one process, as a group of ranks under mpirun, or as a connection to one that runs."""
