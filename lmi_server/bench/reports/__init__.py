"""What a run of the load generator is shown as: lines in a terminal, and a page with plots."""
