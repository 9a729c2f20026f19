"""A server as the commands and the measurements see it: calls to a running one, and one started for a while."""
