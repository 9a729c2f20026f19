"""What this computer has: processors, GPUs, memory, ports, MPI launchers, environment variables."""
