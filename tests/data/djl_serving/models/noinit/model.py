from djl_python import Output

N = 0


def handle(inputs):
    global N
    N += 1
    if inputs.is_empty():
        return None
    return Output().add_as_json({"n": N})
