"""The models of a server: found, registered, fetched, loaded, loaded again, chosen and unregistered."""
