"""The processes beside the actors, in which requests run: both ends of a connection from a front end to a replica."""
