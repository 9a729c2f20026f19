"""What runs inside a worker process, `python -m lmi_server.worker`: it answers the requests that come over the link.

It reaches a handler by its name in the Load message, and imports none.

    __main__.py          starts the process, and ends it whatever the handler does
    worker.py            acts on the messages of the link: load, requests, commands, heartbeat, shutdown
    handler_loading.py   makes the handler that a Load names
    services/            serve the requests of the model, on the link's event loop or in a thread beside it
    processors/          answer one request, by the kind of handler
    answers/             the way back: collect the answers to all requests and send them over the link
    group.py             the processes of a worker that is a group of MPI ranks
"""
