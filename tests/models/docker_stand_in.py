"""Stands in for docker where SageMaker's SDK calls `docker compose -f FILE up` for the one service of its file.

It becomes what LOCAL_MODE_COMMAND names, a JSON list: a program that takes docker's command line, or, where no
container can run, `lmi-server` itself, with the variables of the service, its model and its port. For tests only.
"""

import json
import os
import sys
from pathlib import Path

import yaml


def main() -> None:
    _, *arguments = sys.argv
    if arguments[:2] == ["compose", "version"]:
        print("Docker Compose version v2")
    elif arguments[0] != "compose":  # it asks for the address of another machine's docker
        sys.exit("there is none")
    else:
        compose_up(Path(arguments[arguments.index("-f") + 1]))


def compose_up(file: Path) -> None:
    """Become the service of the file."""
    [service] = yaml.safe_load(file.read_text())["services"].values()
    command = json.loads(os.environ["LOCAL_MODE_COMMAND"])
    if command[1:] == ["run"]:
        lists = {"--publish": service["ports"], "--volume": service["volumes"], "--env": service["environment"]}
        options = [word for option, values in lists.items() for value in values for word in (option, value)]
        command += ["--rm", *options, service["image"]]
    else:
        [port], [volume] = service["ports"], service["volumes"]
        variables = dict(variable.split("=", 1) for variable in service["environment"])
        os.environ |= variables | {"SERVING_PORT": port.split(":")[0], "SERVING_MODEL_STORE": volume.split(":")[0]}
    os.execvp(command[0], [*command, service["command"]])


if __name__ == "__main__":
    main()
