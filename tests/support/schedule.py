"""Which process of pytest-xdist runs which files, and in which order (`--dist loadfile --no-loadscope-reorder`)."""

from __future__ import annotations

import functools

import pytest
from xdist.scheduler import LoadFileScheduling

# Files whose tests share servers of the session run in one process, as if they were one file, and so do others that
# import vLLM. So do files whose servers are forks of one process that has imported transformers (forked_servers.py).
_LIKE_TEST_VLLM = (
    "engines/vllm/test_adapters",
    "engines/vllm/test_constraint_bounds",
    "engines/vllm/test_drivers",
    "engines/vllm/test_images",
    "engines/vllm/test_library",
    "engines/vllm/test_lmi_dist",
    "engines/vllm/test_media",
    "engines/vllm/test_ranks",
    "engines/vllm/test_requests",
    "engines/vllm/test_versions",
    "engines/vllm/test_vllm_openai",
    "engines/vllm/test_vllm_pooling",
    "http/test_clients",
)
_FORKS_WITH_TRANSFORMERS = (
    "engines/huggingface/test_gguf",
    "engines/huggingface/test_huggingface_options",
    "engines/huggingface/test_unbatched",
    "engines/neuronx/test_neuronx",
    "engines/rolling_batch/test_decoding_strategy",
    "engines/rolling_batch/test_eight_bits",
    "engines/rolling_batch/test_images_http",
    "engines/rolling_batch/test_request_ids",
    "engines/rolling_batch/test_tensor_parallel",
    "engines/rolling_batch/test_waiting_requests",
    "engines/tasks/test_speech_http",
    "engines/tasks/test_tasks_http",
    "http/test_adapters_end_to_end",
    "http/test_client_libraries",
    "http/test_console_browser",
    "http/test_failed_models",
    "http/test_first_answers",
    "http/test_model_file_end_to_end",
    "http/test_tools",
    "packaging/test_gpu_check",
)
AS_ONE_FILE = {
    "tests/commands/test_partition.py": "tests/engines/deepspeed/test_deepspeed.py",
    "tests/packaging/test_installed.py": "tests/packaging/test_one_extra.py",
    **{f"tests/{name}.py": "tests/engines/vllm/test_vllm.py" for name in _LIKE_TEST_VLLM},
    **{f"tests/{name}.py": "tests/engines/rolling_batch/test_lmi_requests.py" for name in _FORKS_WITH_TRANSFORMERS},
}
# Without the slow tests, most of what these folders take is the import of their libraries: once is enough.
TOGETHER_WITHOUT_SLOW = ("artifacts", "configuration", "dialects", "unit")
# A process that starts a long file last would work on while the others have nothing left to do. So the three longest
# come first: two that are made of many files, and eight installations one after the other. The tests of hosting wait
# more than they compute. Those of artifacts wait for servers of storage, and are one file without the slow ones.
LONGEST = (
    "engines/vllm/test_vllm.py",
    "engines/rolling_batch/test_lmi_requests.py",
    "packaging/test_one_extra",
    "chaos/",
    "engines/deepspeed/",
    "engines/vllm/",
    "ray/",
    "http/test_end_to_end",
    "commands/test_tune",
    "hosting/",
    "artifacts/",
    "packaging/",
    "engines/rolling_batch/",
    "engines/tasks/",
    "http/test_limits",
    "worker/test_pool",
    "commands/",
    "fuzz/",
    "engines/",
    "http/",
    "worker/",
)


class FilesTogether(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = file.split("/")[1]
        if self.config.getoption("markexpr") == "not slow" and folder in TOGETHER_WITHOUT_SLOW:
            return f"tests/{folder}"
        return AS_ONE_FILE.get(file, file)


def longest_first(item: pytest.Item) -> int:
    """Return the place of a test in the order in which files start; files of one place keep their order."""
    return _place(item.nodeid.partition("::")[0])


@functools.cache
def _place(file: str) -> int:
    name = AS_ONE_FILE.get(file, file).removeprefix("tests/")
    places = (place for place, start in enumerate(LONGEST) if name.startswith(start))
    return next(places, len(LONGEST))
