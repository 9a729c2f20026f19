"""The handlers: one folder per engine, named as serving.properties names it, with `handler.py` and `options.py`.

A handler is reached by its name in `lmi_server/configuration/handlers.py`, and imports no other handler. `handler.py`
and `options.py` import no engine at module level; the other modules of a folder are imported when a model loads.
Shared by several handlers: `rolling_batch/` (the scheduler for engines without one), `checkpoints/`, `tasks/`,
`step_loop.py` (drives an engine in a thread of the worker), `content.py` (bodies of requests that are not text
generation), `batch_messages.py` (from rank 0 of a group to the others), `neuron_failures.py` (what Neuron's libraries
raise) and `user_code.py` (finds and imports a user's model.py). Imports of `lmi_server`: `contract`, `machine`,
`dialects` and the declarations of options.
"""
