"""OpenAI's Files and Batches: requests in a file, answered at low priority."""
