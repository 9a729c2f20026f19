import helper_mod
from djl_python import Output


def handle(inputs):
    if inputs.is_empty():
        return None
    return Output().add("ep_sub:" + helper_mod.NAME)
