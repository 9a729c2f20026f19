"""What runs inside a worker process, `python -m lmi_server.worker`: it answers the requests that come over the link.

It reaches a handler by its name in the Load message.

    __main__.py               starts the process, and ends it whatever the handler does
    worker.py                 acts on the messages of the link: load, requests, commands, heartbeat, shutdown
    service.py                the interface of what serves the model, on the link's event loop
    concurrent_service.py     serves requests as tasks of that loop
    threaded_service.py       serves a handler that runs in the main thread, and watches it (watch.py)
    handler_thread.py         that thread; batch_runner.py and concurrent_runner.py are what runs in it (runner.py)
    generation_processor.py   answers one request to an LLMHandler; formats.py chooses who parses it
    response_processor.py     answers one request to an AsyncRequestHandler (request_processor.py)
    frame_buffer.py           the way back: collects the answers to all requests and sends them over the link
    group.py                  the processes of a worker that is a group of MPI ranks
"""
