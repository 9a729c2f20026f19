"""Serves models from directories with a `serving.properties`; see docs/architecture.md for the way of a request.

contract/       what every process shares: errors, messages, the handlers' contract
machine/        what this computer has: devices, memory, MPI, environment variables
processes/      process trees and what they use, secrets, the imports of a process that loads a model
files/          files that are written at once, compared, or executed
configuration/  serving.properties and the other layers -> typed options
explain/        what `explain`, `check` and docs/configuration.md print
artifacts/      downloads and unpacks models before their workers start
serving/        the queue side, in the front end's process: models, job queues, pools
supervisor/     starts, watches and ends worker processes
worker/         what runs inside a worker process
dialects/       LMI's, OpenAI's and Anthropic's requests and answers: pure functions
media/          the images and sounds of requests, decoded within limits
compat/         `djl_python`, on the path of workers only
commands/       the command line
client/         a server as commands and measurements see it
features.py     the table of optional features, which the rest goes through

The modules `handler`, `generation`, `protocol` and `errors` are the names under which code of one's own imports the
contract; modules of this project import it from `contract/`.
"""
