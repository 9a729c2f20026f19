"""The process that an ingress of a Ray cluster starts."""
