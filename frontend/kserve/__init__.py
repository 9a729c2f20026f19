"""KServe's open inference protocol."""
