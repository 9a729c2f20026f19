"""What text-generation-inference's clients ask a server for beside text."""
