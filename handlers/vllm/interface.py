"""What the handlers take from vLLM beside the names that they import: methods, their keywords, and attributes.

It is read in vLLM's source, as `engine_fields.py` reads it. So an untested version is refused with the
names that it lacks, before the engine loads; an AttributeError in the middle of a request would end a worker.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping

from handlers.vllm.engine_fields import source
from lmi_server.contract.errors import ModelLoadError

TESTED = ("0.31", "0.32", "0.33")
"""The versions that tests cover; the extras vllm and vllm-cuda of setup.cfg ask for this range."""

_ENGINE = (
    "add_lora(lora_request) remove_lora(lora_id) pin_lora(lora_id) sleep(level) wake_up reset_prefix_cache"
    " get_num_unfinished_requests get_supported_tasks vllm_config renderer from_vllm_config(vllm_config stat_loggers) "
)

USED: Mapping[str, str] = {
    "v1.engine.llm_engine.LLMEngine": _ENGINE
    + "add_request(lora_request priority) abort_request step has_unfinished_requests engine_core logger_manager"
    " model_executor output_processor",
    "v1.engine.async_llm.AsyncLLM": _ENGINE + "generate(lora_request priority) shutdown engine_core",
    "v1.engine.core_client.BackgroundResources": "engine_dead",
    "v1.engine.core_client.InprocClient": "get_output get_supported_tasks add_request abort_requests shutdown"
    " add_lora remove_lora pin_lora",
    "v1.engine.output_processor.OutputProcessor": "tokenizer",
    "v1.executor.uniproc_executor.ExecutorWithExternalLauncher": "_distributed_args",
    "v1.executor.abstract.Executor": "register_failure_callback",
    "v1.metrics.stats.SchedulerStats": "num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage",
    "v1.metrics.stats.IterationStats": "num_generation_tokens num_prompt_tokens",
    "renderers.base.BaseRenderer": "get_tokenizer render_cmpl render_cmpl_async render_chat_async"
    " default_cmpl_tok_params",
    "renderers.online_renderer.OnlineRenderer": "__init__(request_logger chat_template chat_template_content_format"
    " enable_auto_tools tool_parser reasoning_parser) render_chat parser renderer default_chat_template_kwargs",
    "renderers.params.TokenizeParams": "max_total_tokens truncate_prompt_tokens truncation_side add_special_tokens"
    " max_total_tokens_param",
    "renderers.params.ChatParams": "with_defaults chat_template chat_template_content_format chat_template_kwargs",
    "parser.abstract_parser.Parser": "parse(enable_auto_tools model_output_token_ids)"
    " parse_delta(prompt_token_ids finished) count_reasoning_tokens",
    "entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": "build_chat_params"
    " extract_structured_outputs include_reasoning skip_special_tokens spaces_between_special_tokens",
    "entrypoints.pooling.typing.PoolingServeContext": "request model_name request_id pooling_params lora_request"
    " priorities prompt_extras engine_inputs final_res_batch",
    "entrypoints.pooling.base.io_processor.PoolingIOProcessor": "create_pooling_params",
    "sampling_params.SamplingParams": "temperature top_k top_p min_p repetition_penalty presence_penalty"
    " frequency_penalty logit_bias bad_words allowed_token_ids structured_outputs seed stop stop_token_ids"
    " include_stop_str_in_output ignore_eos skip_special_tokens spaces_between_special_tokens max_tokens min_tokens"
    " logprobs prompt_logprobs output_kind stream_interval skip_clone extra_args repetition_detection detokenize",
    "sampling_params.StructuredOutputsParams": "json regex choice grammar json_object structural_tag"
    " whitespace_pattern disable_any_whitespace disable_additional_properties",
    "pooling_params.PoolingParams": "task dimensions use_activation clone verify",
    "outputs.RequestOutput": "request_id outputs finished prompt_token_ids prompt_logprobs num_cached_tokens"
    " kv_transfer_params",
    "outputs.CompletionOutput": "text token_ids logprobs finish_reason stop_reason",
    "outputs.PoolingRequestOutput": "request_id outputs prompt_token_ids",
    "outputs.ScoringRequestOutput": "from_base",
    "engine.arg_utils.AsyncEngineArgs": "add_cli_args",
    "engine.arg_utils.EngineArgs": "create_engine_config",
    "config.model.ModelConfig": "get_num_experts",
    "multimodal.media.connector.MediaConnector": "__init__(connection) load_from_url load_from_url_async"
    " _assert_url_in_allowed_media_domains",
    "connections.HTTPConnection": "get_sync_client get_async_client",
}
"""By class: its members, each with the keywords that it is called with."""
_MEMBER = re.compile(r"(\w+)(?:\(([^)]*)\))?")


def check_version(version: str) -> str | None:
    """Return a warning if `version` of the installed vLLM is not a tested one.

    Raises ModelLoadError if that version lacks what the handlers use, with the names and the remedy.
    """
    if version.startswith(tuple(f"{tested}." for tested in TESTED)):
        return None
    missing = list(lacking())
    if missing:
        raise ModelLoadError(
            f"vLLM {version} lacks what this handler uses: {', '.join(missing)}; "
            f"install one of {TESTED[0]} to {TESTED[-1]}, or set option.engine_version={TESTED[-1]}.0"
        )
    return f"vLLM {version} is installed; the handler is tested with {TESTED[0]} to {TESTED[-1]}"


def lacking(read: Callable[[str], ast.Module] = source, used: Mapping[str, str] = USED) -> Iterator[str]:
    """Yield the name of each class, member and keyword of `used` that the files of a vLLM, as `read` has them, lack."""
    for place, members in used.items():
        module, _, name = place.rpartition(".")
        file = read(f"{module.replace('.', '/')}.py")
        found = next((node for node in file.body if isinstance(node, ast.ClassDef) and node.name == name), None)
        if found is None:
            yield f"vllm.{place}"
            continue
        has = _members(found)
        for member, keywords in _MEMBER.findall(members):
            if member not in has:
                yield f"vllm.{place}.{member}"
            else:
                yield from (f"vllm.{place}.{member}({word}=)" for word in keywords.split() if word not in has[member])


class _Anything(frozenset[str]):
    """The keywords of a function with **keywords, and of what is no function."""

    def __contains__(self, _: object) -> bool:
        return True


def _members(found: ast.ClassDef) -> Mapping[str, frozenset[str]]:
    """Return what a class defines, and which keywords each takes: methods, fields, and attributes that methods set."""
    members: dict[str, frozenset[str]] = {}
    for node in ast.walk(found):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                members[name] = _keywords(node.args)
            case (
                ast.AnnAssign(target=ast.Name(id=name))
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
            ):
                members.setdefault(name, _Anything())
    return members


def _keywords(arguments: ast.arguments) -> frozenset[str]:
    if arguments.kwarg is not None:
        return _Anything()
    return frozenset(argument.arg for argument in (*arguments.args, *arguments.kwonlyargs))
