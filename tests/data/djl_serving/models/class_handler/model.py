from djl_python import Input, Output


class S:
    def __init__(self):
        self.p = None

    def initialize(self, properties):
        self.p = properties

    def inference(self, inputs):
        return Output().add_as_json({"b": inputs.get_as_json()})


_service = S()


def handle(inputs: Input):
    if _service.p is None:
        _service.initialize(inputs.get_properties())
    if inputs.is_empty():
        return None
    return _service.inference(inputs)
