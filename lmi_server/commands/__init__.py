"""The command line `lmi-server`, one module per command; `cli` is the composition root that knows the front end."""
