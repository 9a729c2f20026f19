"""`lmi-server migrate`: turns the configuration of another model server into serving.properties, and runs nothing."""
