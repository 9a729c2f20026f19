"""Counts the requests of each session, and answers with its process id."""

import os

from djl_python import Input, Output, SessionManager

manager = None


def handle(inputs: Input) -> Output | None:
    global manager
    if inputs.is_empty():
        manager = SessionManager(inputs.get_properties())
        return None
    if inputs.get_as_json().get("requestType") == "NEW_SESSION":
        session = manager.create_session()
        output = Output().add_property("X-Amzn-SageMaker-Session-Id", session.session_id)
        return output.add_as_json({"pid": os.getpid()})
    session = manager.get_session(inputs.get_property("X-Amzn-SageMaker-Session-Id"))
    session.put("count", session.get("count", 0) + 1)
    return Output().add_as_json({"pid": os.getpid(), "count": session.get("count")})
