"""Code in LMI's contract (`djl_python`): its functions, inputs, outputs, adapters and rolling batches."""
