"""The arguments of LMI's worker and of its tool for tests, for code that starts or wraps one of them."""

from __future__ import annotations

import argparse


class ArgParser:
    """The parsers of the commands `djl_python_engine` and `djl-test-model`."""

    @staticmethod
    def python_engine_args() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser("djl_python_engine", description="Worker that LMI starts for a model.")
        parser.add_argument("--model-dir", required=True, help="directory of the model")
        parser.add_argument("--entry-point", help="file or module with the function that takes requests")
        parser.add_argument("--sock-type", required=True, choices=["unix", "tcp"], help="kind of the socket")
        parser.add_argument("--sock-name", help="path of a unix socket, or address of a tcp socket")
        parser.add_argument("--device-id", default="-1", help="device of the model; -1 is the CPU")
        parser.add_argument("--port", help="port of a tcp socket")
        parser.add_argument("--tensor-parallel-degree", type=int, help="devices that each layer is split over")
        parser.add_argument("--pipeline-parallel-degree", type=int, help="stages that the layers are divided into")
        parser.add_argument("--cluster-size", type=int, help="machines that serve the model together")
        parser.add_argument("--recommended-entry-point", help="module to use if the entry point takes no requests")
        parser.add_argument("--log-level", default="info", help="lowest level that is logged")
        parser.add_argument(
            "--async-mode", action=argparse.BooleanOptionalAction, help="call the function for many requests at once"
        )
        return parser

    @staticmethod
    def test_model_args() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser("djl-test-model", description="Sends one request to a model's code.")
        parser.add_argument("--model-dir", help="directory of the model")
        parser.add_argument("--entry-point", default="model.py", help="file with the function that takes requests")
        parser.add_argument("--handler", default="handle", help="name of the function")
        parser.add_argument("--input", nargs="+", default=["input.txt"], help="files, texts, or name=file, name=text")
        parser.add_argument("--parameters", nargs="+", help="properties of the request, as name=value")
        return parser
