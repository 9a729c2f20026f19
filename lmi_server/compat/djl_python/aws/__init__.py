"""Access to services of AWS."""
