"""Linear layers on a GPU whose weights are small numbers with a scale for each group of inputs."""
