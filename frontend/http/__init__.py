"""HTTP: the protocol, its listeners and limits, and what every answer needs."""
