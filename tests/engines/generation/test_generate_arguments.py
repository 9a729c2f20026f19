"""No argument of transformers' generate() is taken and left out without a word."""

from __future__ import annotations

import pytest
from parameter_checks import check_parameter
from transformers import GenerationConfig

from handlers.tasks.task import read_parameters
from handlers.tasks.text_tasks import TextGeneration
from lmi_server.contract.errors import RequestError
from lmi_server.dialects.lmi import NO_EFFECT


def arguments_of_generate() -> list[str]:
    names = [*GenerationConfig().to_dict(), "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids"]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def test_every_argument_changes_the_request_or_is_refused_by_name() -> None:
    for name in arguments_of_generate():
        if name not in NO_EFFECT:
            check_parameter(name)


def test_a_static_batch_takes_an_argument_of_generate_or_refuses_it_by_name() -> None:
    for name in arguments_of_generate():
        if name not in TextGeneration.parameters:
            with pytest.raises(RequestError, match=f"parameters.{name} is not known"):
                read_parameters({name: 1}, TextGeneration.parameters)
