"""The queue side, in the front end's process: `models` have a `pool` of workers, and `dispatch` gives it requests."""
