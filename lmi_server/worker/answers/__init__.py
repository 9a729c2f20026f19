"""The way back from a worker to the front end: the answers to all requests, and what is counted of each."""
