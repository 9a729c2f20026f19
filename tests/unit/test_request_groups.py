"""Requests that run in groups: one that fails, and one without a result, leave the others their answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from handlers.request_groups import GroupHandler, ParsedRequest
from lmi_server.contract.errors import HandlerError, LmiServerError, RequestError
from lmi_server.contract.handler import ModelInfo, Response
from lmi_server.contract.protocol import Input


class Doubling(GroupHandler[ParsedRequest]):
    """Doubles the numbers of a body. It refuses 13, leaves out the result of 0, and cannot read inf or write 8."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []

    def start(self, model_dir: str, options: Any) -> ModelInfo:
        return ModelInfo(max_model_len=0)

    def parse(self, request: Input) -> ParsedRequest:
        if request.body() == b"inf":
            raise OverflowError("no integer holds it")
        return ParsedRequest([int(number) for number in request.body().split()], _written)

    def group_of(self, call: ParsedRequest) -> Hashable:
        return ()

    def run(self, inputs: Sequence[Any], calls: Sequence[ParsedRequest]) -> Sequence[Any]:
        self.runs.append(list(inputs))
        if 13 in inputs:
            raise ValueError("13 is not doubled")
        return [2 * number for number in inputs if number]


def _written(results: Sequence[Any]) -> Response:
    if 8 in results:
        raise OSError("8 has no form")
    return Response(headers=[], data=b" ".join(b"%d" % result for result in results))


def outcomes(handler: Doubling, *bodies: bytes) -> list[bytes | type[LmiServerError]]:
    found = handler.handle([Input("invocations", {}, [("data", body)]) for body in bodies])
    return [type(one) if isinstance(one, LmiServerError) else one.data for one in found]


def test_requests_of_a_group_run_at_once() -> None:
    handler = Doubling()
    assert outcomes(handler, b"1 2", b"", b"3") == [b"2 4", b"", b"6"]
    assert handler.runs == [[1, 2, 3]]


def test_a_request_that_fails_leaves_the_others_their_answers() -> None:
    assert outcomes(Doubling(), b"1", b"5 13", b"3") == [b"2", RequestError, b"6"]


def test_a_request_that_breaks_its_parser_fails_alone() -> None:
    assert outcomes(Doubling(), b"1", b"inf", b"3") == [b"2", HandlerError, b"6"]


def test_an_answer_that_cannot_be_written_fails_alone() -> None:
    assert outcomes(Doubling(), b"1", b"4", b"3") == [b"2", HandlerError, b"6"]


def test_inputs_without_a_result_fail_their_request_alone() -> None:
    assert outcomes(Doubling(), b"1", b"0 5", b"3") == [b"2", HandlerError, b"6"]
