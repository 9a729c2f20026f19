"""What is counted, and the formats in which it is read."""
