"""A server as the commands and the measurements see it: calls to one that runs, and one that is started for a while."""
