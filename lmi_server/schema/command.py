"""`lmi-server schema`: prints the JSON Schema of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

import typer

from lmi_server.schema.documents import config_properties, model_file, serving_properties
from lmi_server.schema.values import Schema


class SchemaFile(StrEnum):
    """The files that have a schema."""

    SERVING = "serving.properties"
    MODEL_FILE = "model-file"
    CONFIG = "config.properties"


_SCHEMAS: Mapping[SchemaFile, Callable[[bool], Schema]] = {
    SchemaFile.SERVING: serving_properties,
    SchemaFile.MODEL_FILE: model_file,
    SchemaFile.CONFIG: config_properties,
}


def schema(
    file: Annotated[
        SchemaFile, typer.Argument(help="serving.properties and config.properties as flat objects; Ray's YAML.")
    ] = SchemaFile.SERVING,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse keys that neither a handler nor an engine installed here declares.")
    ] = False,
) -> None:
    """Print the JSON Schema of a file. It knows single values; `lmi-server check` knows everything."""
    typer.echo(json.dumps(_SCHEMAS[file](strict), indent=2, ensure_ascii=False))
