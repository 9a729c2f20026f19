"""A handler of one's own: `model.py`, in LMI's contract (`djl_python`) or in that of `lmi_server.contract.handler`."""
