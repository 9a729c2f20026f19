"""`lmi-server verify`: says which answers of a model changed with a new version, and how its speed did."""
