"""Images by a tiny Stable Diffusion: one server, asked as LMI's, OpenAI's and Hugging Face's clients do.

The tests without the server load further pipelines. They are in the same module so that diffusers is imported once.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from forked_servers import run_command
from huggingface_hub import InferenceClient
from model_directories import write_properties
from neuronx_helpers import FAKE_OPTIMUM_NEURON, importable
from paths import DATA
from pipeline_helpers import request, started
from server_helpers import Server, connect, running
from tiny_pipelines import (
    SIDE,
    half_transparent,
    half_white,
    opened,
    picture,
    pixels,
    save_flux,
    save_lora,
    save_pipeline,
    save_sd3,
    save_sdxl,
)

from handlers.stable_diffusion.neuron_options import NeuronImageOptions
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ModelLoadError, ModelMemoryError, RequestError
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Adapter
from lmi_server.explain.explanation import explain

pytestmark = pytest.mark.slow

FEW = {"num_inference_steps": 2, "seed": 5}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a pipeline as the refusals of LMI's rows say to write it, with an adapter beside it."""
    directory = tmp_path_factory.mktemp("images") / "model"
    pipeline = save_pipeline(directory / "pipeline")
    save_lora(pipeline, directory / "adapters" / "beside", seed=1)
    keys = ("enable_lora=true", "threads=1", "max_image_pixels=4096", "max_inference_steps=1000", "max_images=4")
    chosen = ["engine=Python", "option.entryPoint=djl_python.stable_diffusion", f"option.model_id={pipeline}"]
    lines = [*chosen, *(f"option.{key}" for key in keys), "batch_size=4", "max_batch_delay=10"]
    (directory / "serving.properties").write_text("\n".join(lines))
    with running(directory, libraries="diffusers", workers=1) as server:
        yield server


@pytest.fixture(scope="module")
def tiny(served: Server) -> Path:
    """Return the directory of the pipeline that the server has."""
    return Path(served.http.get("/v1/models").json()["data"][0]["root"])


def ask(server: Server, body: Any, path: str = "/invocations", **headers: str) -> httpx.Response:
    return server.http.post(path, json=body, headers=headers)


def drawn(server: Server, prompt: str = "a cat", **parameters: Any) -> Any:
    """Return the pixels of LMI's answer to a prompt."""
    answer = ask(server, {"prompt": prompt, "parameters": {**FEW, **parameters}})
    assert answer.headers["content-type"] == "image/png", answer.text
    return pixels(answer.content)


def same(found: Any, expected: Any) -> bool:
    """Return whether images are equal but for rounding, which depends on the other images of a batch."""
    return bool(found.shape == expected.shape and np.abs(found - expected).max() <= 1)


def sdk(server: Server) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    return server.clients.enter_context(client)


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- LMI's paths ---


def test_the_answer_is_an_image_of_the_type_that_the_client_accepts(served: Server) -> None:
    body = {"prompt": "a cat", "parameters": FEW}
    for accepted, kind in (("image/jpeg", "JPEG"), ("image/webp, */*", "WEBP"), ("*/*", "PNG"), ("image/*", "PNG")):
        answer = ask(served, body, Accept=accepted)
        assert opened(answer.content).format == kind
        assert answer.headers["content-type"] == f"image/{kind.lower()}"
    assert opened(answer.content).size == (SIDE, SIDE)
    decoded = ask(served, body, Accept="application/json").json()
    assert decoded["seeds"] == [5]
    assert base64.b64decode(decoded["images"][0]) == answer.content
    refused = ask(served, body, Accept="text/csv")
    assert (refused.status_code, "accept image/png" in refused.json()["message"]) == (424, True)


def test_a_text_a_form_and_inputs_ask_for_the_same_image(served: Server) -> None:
    expected = drawn(served)
    assert same(pixels(ask(served, {"inputs": "a cat", "parameters": FEW}).content), expected)
    form = {"prompt": "a cat", "num_inference_steps": "2", "seed": "5"}
    assert same(pixels(served.http.post("/invocations", data=form).content), expected)
    text = served.http.post("/predictions/model", content="a cat", headers={"Content-Type": "text/plain"})
    assert opened(text.content).size == (SIDE, SIDE)


def test_requests_at_once_get_the_images_that_they_get_alone(served: Server) -> None:
    prompts = ["a cat", "a dog", "two cats", "a house"]
    alone = [drawn(served, prompt, seed=number) for number, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda number: drawn(served, prompts[number], seed=number), range(4)))
    assert all(same(found, expected) for found, expected in zip(together, alone, strict=True))
    assert not same(alone[0], alone[1])


def test_each_image_of_a_request_has_a_seed_of_its_own(served: Server) -> None:
    body = {"prompt": ["a cat", "a dog"], "parameters": {**FEW, "num_images_per_prompt": 2}}
    answer = ask(served, body).json()
    assert answer["seeds"] == [5, 6, 7, 8]
    last = pixels(base64.b64decode(answer["images"][3]))
    assert same(last, drawn(served, "a dog", seed=8))
    refused = ask(served, body, Accept="image/png")
    assert (refused.status_code, "asks for 4; accept application/json" in refused.json()["message"]) == (424, True)
    free = ask(served, {"prompt": "a cat", "parameters": {"num_inference_steps": 2}}, Accept="application/json").json()
    assert same(pixels(base64.b64decode(free["images"][0])), drawn(served, seed=free["seeds"][0]))


def test_parameters_change_the_image(served: Server) -> None:
    usual = drawn(served)
    changes: list[dict[str, Any]] = [
        {"guidance_scale": 1.0},
        {"negative_prompt": "a dog"},
        {"num_inference_steps": 3},
        {"seed": 6},
    ]
    for more in changes:
        assert not same(drawn(served, **more), usual), more
    assert drawn(served, width=24, height=32).shape == (32, 24, 3)


def test_an_image_and_a_mask_choose_the_task(served: Server) -> None:
    image = picture((20, 18), seed=3)
    body = {"prompt": "a cat", "image": coded(image), "parameters": {**FEW, "num_inference_steps": 4}}
    changed = pixels(ask(served, body).content)
    assert changed.shape == (18, 20, 3)
    weak = pixels(ask(served, {**body, "parameters": {**body["parameters"], "strength": 0.25}}).content)
    assert not same(weak, changed)
    painted = pixels(ask(served, {**body, "mask_image": coded(half_white((20, 18)))}).content)
    assert not same(painted, changed)
    # LMI's form, in which `data` is the image.
    part = '{"prompt": "a cat", "parameters": {"num_inference_steps": 4, "seed": 5}}'
    form = served.http.post("/invocations", files={"data": image, "json": (None, part)})
    assert same(pixels(form.content), changed)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"width": 17}, "17 x 17 is not allowed; send multiples of 2"),
        ({"width": 128, "height": 64}, "128 x 64 pixels are more than option.max_image_pixels=4096"),
        ({"num_images_per_prompt": 5}, "asks for 5 images, and option.max_images is 4"),
        ({"num_inference_steps": 1001}, "1001 is more than option.max_inference_steps=1000"),
        ({"num_inference_steps": 0}, "send an integer >= 1"),
        ({"true_cfg_scale": 2}, "true_cfg_scale is not known to StableDiffusionPipeline; allowed: prompt, negative"),
        ({"latents": [1]}, "latents is not known"),
        ({"negative_prompt": ["a", "b"]}, "negative_prompt: 2 texts for 1 prompts"),
        ({"guidance_scale": "high"}, "send a number from 0 to 1000"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_it_takes_memory(
    served: Server, parameters: dict[str, Any], words: str
) -> None:
    answer = ask(served, {"prompt": "a cat", "parameters": parameters})
    assert answer.status_code == 424
    assert words in answer.json()["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"parameters": {}}, "prompt is missing"),
        ({"prompt": "a", "image": "%"}, "is not base64"),
        ({"prompt": "a", "image": coded(b"GIF?")}, "image is not an image of a known format"),
        ({"prompt": "a", "mask_image": coded(half_white())}, "mask_image needs an image"),
        ({"prompt": "a", "image": coded(picture((80, 80)))}, "80 x 80 pixels are more than option.max_image_pixels"),
        ({"prompt": "a", "image": "http://169.254.169.254/"}, "is not fetched"),
        ({"prompt": "a", "image": coded(picture()), "parameters": {"strength": 0.01}}, "is less than one step"),
        ({"prompt": "a", "adapters": "none"}, "adapter none has not been registered; registered: beside"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(served: Server, body: Any, words: str) -> None:
    answer = ask(served, body)
    assert answer.status_code == 424
    assert words in answer.json()["message"]


def test_a_broken_request_does_not_fail_the_others(served: Server) -> None:
    """Whatever a client sends is refused by name, also as a form and as a file that ends too soon."""
    cut = served.http.post("/invocations", files={"data": picture()[:-30], "prompt": (None, "a")})
    assert (cut.status_code, "image is an image that cannot be read" in cut.json()["message"]) == (424, True)
    text = served.http.post("/invocations", files={"prompt": (None, "a"), "parameters": (None, "many")})
    assert (text.status_code, "parameters" in text.json()["message"]) == (424, True)
    twice = served.http.post("/v1/images/edits", files=[("image[]", picture()), ("image[]", picture())])
    assert (twice.status_code, "more than once" in twice.json()["error"]["message"]) == (400, True)


# --- clients ---


def test_openai_s_sdk_draws(served: Server) -> None:
    with sdk(served) as client:
        answer = client.images.generate(
            model="model", prompt="a cat", n=2, size="24x16", output_format="jpeg", extra_body=FEW
        )
        one = client.images.generate(model="model", prompt="a cat", extra_body=FEW)
    assert answer.data is not None
    assert one.data is not None
    files = [base64.b64decode(item.b64_json or "") for item in answer.data]
    assert [(opened(file).format, opened(file).size) for file in files] == [("JPEG", (24, 16))] * 2
    assert (answer.output_format, answer.size) == ("jpeg", "24x16")
    assert same(pixels(base64.b64decode(one.data[0].b64_json or "")), drawn(served))


def test_openai_s_sdk_edits_where_the_mask_is_transparent(served: Server) -> None:
    image, more = picture(seed=3), {"num_inference_steps": 4, "seed": 5}
    with sdk(served) as client:
        edited = client.images.edit(image=image, mask=half_transparent(), prompt="a cat", extra_body=more)
        whole = client.images.edit(image=io.BytesIO(image), prompt="a cat", extra_body=more)
    form = {"model": "model", "n": "2", **{name: str(value) for name, value in more.items()}}
    varied = served.http.post("/v1/images/variations", data=form, files={"image": image}).json()  # the SDK warns of it
    body = {"prompt": "a cat", "image": coded(image), "parameters": more}
    assert same(_only(whole), pixels(ask(served, body).content))
    painted = ask(served, {**body, "mask_image": coded(half_white())}).content
    assert same(_only(edited), pixels(painted))
    assert [item["seed"] for item in varied["data"]] == [5, 6]


def _only(answer: Any) -> Any:
    (item,) = answer.data
    return pixels(base64.b64decode(item.b64_json))


def test_errors_have_openai_s_form(served: Server) -> None:
    import openai

    usual: dict[str, Any] = {"model": "model", "prompt": "a cat"}

    def refused(**body: Any) -> str:
        with sdk(served) as client, pytest.raises(openai.BadRequestError) as raised:
            client.images.generate(**{**usual, **body})
        return str(raised.value)

    assert "this server keeps no files that a URL could name" in refused(response_format="url")
    assert "send opaque" in refused(background="transparent")
    assert "stream is not supported; an image is sent whole" in refused(stream=True)
    assert "more than option.max_image_pixels=4096" in refused(size="1024x1024")
    with sdk(served) as client, pytest.raises(openai.NotFoundError):
        client.images.generate(model="another", prompt="a cat")
    answer = ask(served, {"messages": []}, "/v1/chat/completions")
    assert (answer.status_code, "/v1/images/generations" in answer.json()["error"]["message"]) == (400, True)


def test_hugging_face_s_client_draws(served: Server) -> None:
    client = InferenceClient(model=f"http://127.0.0.1:{served.port}")
    image = client.text_to_image("a cat", num_inference_steps=2, seed=5)
    assert same(np.asarray(image, dtype=int), drawn(served))


# --- adapters, clients that leave ---


def test_an_adapter_changes_the_images_of_its_requests_alone(served: Server, tiny: Path, tmp_path: Path) -> None:
    plain = drawn(served)
    body = {"prompt": "a cat", "parameters": FEW}
    beside = pixels(ask(served, {**body, "adapters": "beside"}).content)
    assert not same(beside, plain)
    added = save_lora(tiny, tmp_path / "added", seed=2)
    assert served.http.post("/models/model/adapters", params={"name": "a.b", "src": str(added)}).status_code == 200
    other = pixels(ask(served, {**body, "adapters": "a.b"}).content)
    assert not same(other, beside)
    assert same(pixels(ask(served, {**body, "adapters": "beside"}).content), beside)
    with sdk(served) as client:
        assert same(_only(client.images.generate(model="a.b", prompt="a cat", extra_body=FEW)), other)
    (tmp_path / "empty").mkdir()
    refused = served.http.post("/models/model/adapters", params={"name": "c", "src": str(tmp_path / "empty")})
    assert (refused.status_code, "adapter c cannot be used" in refused.text) == (424, True)
    assert served.http.delete("/models/model/adapters/a.b").status_code == 200
    assert same(drawn(served), plain)


def test_the_pipeline_stops_when_the_client_leaves(served: Server) -> None:
    body = b'{"prompt": "a cat", "parameters": {"num_inference_steps": 999}}'
    head = b"POST /invocations HTTP/1.1\r\nhost: x\r\nx-request-id: leaves\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection = connect(served, head + body)
    served.log_line(r"request leaves: drawing 1 images")
    connection.close()
    gone = served.log_line(r"request leaves: the client is gone at step (\d+) of 999")
    assert int(gone[1]) < 999
    assert same(drawn(served), drawn(served))


def test_the_document_of_the_server_has_the_paths_of_images(served: Server) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    properties = paths["/v1/images/generations"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "n", "size", "output_format"} <= properties["properties"].keys()
    assert "multipart/form-data" in paths["/v1/images/edits"]["post"]["requestBody"]["content"]


def test_the_next_worker_draws_after_one_was_killed(served: Server) -> None:
    before = drawn(served)
    body = {"prompt": "a cat", "parameters": {"num_inference_steps": 999}}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, served, body, **{"x-request-id": "bereft"})
        served.log_line(r"request bereft: drawing 1 images")
        os.kill(served.worker_pid(), signal.SIGKILL)
        ended = answer.result()
    assert ended.status_code == 503
    assert ended.json()["message"] == "The worker process ended while it held the request"
    served.log_line(r"\] ready: process")
    assert same(drawn(served), before)


# --- without a server ---


def loaded(directory: Path, **options: str) -> Any:
    return started(directory, threads="1", **options)


def test_a_run_ends_with_the_step_in_which_its_last_client_leaves(tiny: Path) -> None:
    handler = loaded(tiny, enable_lora="false")
    sent = [request({"prompt": prompt, "parameters": {"num_inference_steps": 50}}) for prompt in ("a", "b")]
    gone: list[int] = []

    def leave_in_turn(asked: Any) -> bool:
        """The first client leaves before the first step, the second one in the third."""
        gone.append(1)
        return asked is sent[0] or len(gone) > 8

    handler.is_cancelled = leave_in_turn
    outcomes = handler.handle(sent)
    assert [str(outcome) for outcome in outcomes] == ["the client is gone"] * 2
    assert len(gone) < 15
    handler.is_cancelled = lambda asked: asked is sent[0]
    two = [request({"prompt": prompt, "parameters": FEW}) for prompt in ("a", "b")]
    assert all(isinstance(outcome, Response) for outcome in handler.handle(two))


def test_requests_of_a_batch_fail_alone(tiny: Path) -> None:
    handler = loaded(tiny, dtype="bf16", task="text-to-image", height="24", width="16")
    bodies = [{"prompt": "a", "parameters": {"width": 3}}, {"prompt": "b", "parameters": FEW}, {}]
    wrong, right, empty = handler.handle([request(body) for body in bodies])
    assert "multiples of 2" in wrong.message
    assert opened(right.data).size == (16, 24)
    assert "prompt is missing" in empty.message
    (refused,) = handler.handle([request({"prompt": "a", "image": coded(picture())})])
    assert "serves text-to-image, and the request asks for image-to-image; send no image" in refused.message


def test_the_keys_reach_diffusers_as_explain_shows_them(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers
    import torch

    got: dict[str, Any] = {}
    usual = diffusers.DiffusionPipeline.from_pretrained

    def from_pretrained(directory: str, **arguments: Any) -> Any:
        got.update(arguments)
        return usual(directory, **arguments)

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)
    saved = tmp_path / "saved"
    keys = {"model_id": tiny, "dtype": "bf16", "trust_remote_code": "true", "save_mp_checkpoint_path": saved}
    write_properties(tmp_path, entryPoint="djl_python.stable_diffusion", **keys)
    started(tmp_path)
    shown = dict(explain(inspect_model(tmp_path, {})).engine_arguments)
    assert shown == {"use_safetensors": True, "dtype": "bfloat16", "trust_remote_code": True}
    assert got == {**shown, "dtype": torch.bfloat16, "local_files_only": True}
    assert (saved / "model_index.json").is_file()
    documented = json.loads((DATA / "documented_keys.json").read_text())["further options"]["stable_diffusion"]
    assert set(documented) == {"save_mp_checkpoint_path", "enable_cuda_graph"}  # the latter is refused by name


def test_a_run_without_enough_memory_fails_its_requests_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from diffusers import UNet2DConditionModel

    handler = loaded(tiny, enable_lora="false")
    usual = UNet2DConditionModel.forward

    def forward(self: Any, sample: Any, *arguments: Any, **more: Any) -> Any:
        """Draw one image; more do not fit. With guidance there are two samples of each."""
        if len(sample) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return usual(self, sample, *arguments, **more)

    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    two = {"prompt": "a", "parameters": {**FEW, "num_images_per_prompt": 2}}
    one, many, other = handler.handle([request(body) for body in ({"prompt": "b", "parameters": FEW}, two, {**two})])
    assert isinstance(one, Response)
    assert [type(outcome) for outcome in (many, other)] == [ModelMemoryError] * 2
    assert "CUDA out of memory" in many.message


class _PipelineWithoutMemory:
    """Fails to load, or to move to its device, as diffusers' does for want of memory."""

    @classmethod
    def from_pretrained(cls, directory: str, **arguments: Any) -> Any:
        return cls()

    def to(self, device: str) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\nAdvice")


def test_a_pipeline_that_does_not_fit_into_memory_names_the_remedy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    monkeypatch.setattr(diffusers, "DiffusionPipeline", _PipelineWithoutMemory)
    text = r"does not fit into memory \(RuntimeError: .* 9 bytes\); set option.dtype=bf16, or use a machine with more"
    with pytest.raises(ModelMemoryError, match=text):
        loaded(tiny)


def test_a_pipeline_that_inpaints_does_nothing_else(tmp_path: Path) -> None:
    handler = loaded(save_pipeline(tmp_path / "model", inpaints_only=True))
    body = {"prompt": "a", "image": coded(picture()), "mask_image": coded(half_white()), "parameters": FEW}
    (drawn_anew,) = handler.handle([request(body)])
    assert opened(drawn_anew.data).size == (SIDE, SIDE)
    (refused,) = handler.handle([request({"prompt": "a"})])
    assert refused.message.startswith("the model serves inpainting, and the request asks for text-to-image")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers' Euler scheduler
@pytest.mark.parametrize(("save", "multiple"), [(save_sdxl, 2), (save_sd3, 4), (save_flux, 2)])
def test_other_families_have_the_same_tasks(save: Callable[[Path], Path], multiple: int, tmp_path: Path) -> None:
    handler = loaded(save(tmp_path / "model"))
    more = {"num_inference_steps": 4, "seed": 5}  # with fewer, SDXL's strength of 0.3 would be less than a step
    if save is save_flux:
        more["max_sequence_length"] = 16
    wide = {"prompt": "a cat", "parameters": {**more, "width": 32, "height": 16}}
    other = {**wide, "prompt": "a dog", "parameters": {**wide["parameters"], "seed": 9}}
    from_image = {"prompt": "a cat", "image": coded(picture((32, 16))), "parameters": more}
    masked = {**from_image, "mask_image": coded(half_white((32, 16)))}
    outcomes = handler.handle([request(body) for body in (wide, other, from_image, masked)])
    assert [outcome for outcome in outcomes if not isinstance(outcome, Response)] == []
    files = [outcome.data for outcome in outcomes if isinstance(outcome, Response)]
    assert [opened(file).size for file in files] == [(32, 16)] * 4
    (alone,) = handler.handle([request(other)])
    assert same(pixels(alone.data), pixels(files[1]))
    (refused,) = handler.handle([request({"prompt": "a", "parameters": {"width": 33}})])
    assert refused.message.endswith(f"send multiples of {multiple}")


def test_weights_are_not_quantised_without_a_gpu(tiny: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"option\.quantize=bitsandbytes8: diffusers quantises on a GPU only"):
        loaded(tiny, quantize="bitsandbytes8")


def test_only_safetensors_are_read_and_no_code_of_the_model_runs(tiny: Path, tmp_path: Path) -> None:
    pickled = Path(shutil.copytree(tiny, tmp_path / "pickled"))
    weights = pickled / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(Exception, match="safetensors"):
        loaded(pickled)
    coded_model = Path(shutil.copytree(tiny, tmp_path / "code"))
    index = json.loads((coded_model / "model_index.json").read_text())
    index["unet"] = ["own", "UNet2DConditionModel"]
    (coded_model / "model_index.json").write_text(json.dumps(index))
    ran = tmp_path / "ran"
    (coded_model / "unet" / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom diffusers import UNet2DConditionModel")
    with pytest.raises(Exception, match="trust_remote_code"):
        loaded(coded_model)
    assert not ran.exists()


# --- on Neuron cores, over a fake of optimum-neuron ---

INF2 = {
    "entryPoint": "djl_python.stable_diffusion_inf2",
    "enable_lora": "false",
    "width": "24",
    "height": "16",
    "compiled_batch_size": "2",
    "num_images_per_prompt": "2",
}


@pytest.fixture(scope="module")
def neuron() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Let the fake be imported; return the calls that it gets."""
    with importable(FAKE_OPTIMUM_NEURON, "optimum"):
        from optimum.neuron import calls

        yield calls


def test_the_fake_has_the_parameters_of_optimum_neuron(neuron: Any) -> None:
    """A call with a parameter that the real one lacks fails in the tests below."""
    from optimum.neuron import NeuronStableDiffusionPipeline, NeuronStableDiffusionXLPipeline

    recorded = json.loads((DATA / "optimum_neuron_signatures.json").read_text())
    for kind in (NeuronStableDiffusionPipeline, NeuronStableDiffusionXLPipeline):
        for name in ("from_pretrained", "_from_pretrained", "_export", "save_pretrained"):
            parameters = set(inspect.signature(getattr(kind, name)).parameters) - {"self", "kwargs"}
            sizes = set(recorded["InputShapesArguments"]) if name == "_export" else set()
            assert parameters <= {*recorded[f"{kind.__name__}.{name}"], *sizes}, name
    arguments = set(NeuronImageOptions().engine_arguments()) - set(recorded["InputShapesArguments"])
    taken = {
        *recorded["NeuronStableDiffusionPipeline._export"],
        *recorded["NeuronStableDiffusionPipeline.from_pretrained"],
    }
    assert arguments <= taken


def answers(handler: Any, *bodies: Any) -> list[list[Any]]:
    """Return the pixels of the images of each answer."""
    outcomes = handler.handle([request(body, accept="application/json") for body in bodies])
    assert [outcome for outcome in outcomes if not isinstance(outcome, Response)] == []
    return [[pixels(base64.b64decode(file)) for file in json.loads(outcome.data)["images"]] for outcome in outcomes]


def test_graphs_draw_what_the_pipeline_draws(neuron: Any, tiny: Path) -> None:
    """Requests for any number of prompts and images share runs of two prompts with two images each."""
    bodies = [
        {"prompt": "a cat", "parameters": {**FEW, "num_images_per_prompt": 3}},
        {"prompt": ["a dog", "a house"], "parameters": {**FEW, "num_images_per_prompt": 1, "seed": 9}},
    ]
    plain = loaded(tiny, entryPoint="stable_diffusion", width="24", height="16")
    expected = answers(plain, *bodies)
    assert [len(images) for images in expected] == [3, 2]
    drawn_by_graphs = answers(started(tiny, **INF2), *bodies)
    for images, others in zip(drawn_by_graphs, expected, strict=True):
        assert all(same(image, other) for image, other in zip(images, others, strict=True))


def test_lmi_s_keys_reach_optimum_neuron(neuron: Any, tiny: Path, tmp_path: Path) -> None:
    keys = {**INF2, "entryPoint": "djl_python.transformers_neuronx", "use_stable_diffusion": "true"}
    more = {"dtype": "f32", "neuron_optimize_level": "1", "trust_remote_code": "false", "tensor_parallel_degree": "2"}
    write_properties(tmp_path, **keys, **more, model_id=tiny)
    found = inspect_model(tmp_path, {})
    assert (found.spec.title, found.problems, found.warnings) == ("stable_diffusion on Neuron", (), ())
    neuron.clear()
    started(tmp_path)
    shown = dict(explain(found).engine_arguments)
    assert shown == {
        "torch_dtype": "float32",
        "batch_size": 2,
        "height": 16,
        "width": 24,
        "num_images_per_prompt": 2,
        "optlevel": "1",
        "trust_remote_code": False,
        "auto_cast": None,
    }
    ((_, got),) = neuron
    assert (got.pop("class"), got.pop("model_id")) == ("NeuronStableDiffusionPipeline", str(tiny))
    assert got | {"torch_dtype": "float32", "trust_remote_code": False} == {**shown, "export": True}


@pytest.mark.filterwarnings("ignore:Passing `image` as torch tensor:FutureWarning")  # as optimum-neuron does
def test_the_task_chooses_the_class_that_is_compiled(neuron: Any, tiny: Path) -> None:
    painter = started(tiny, **INF2, task="inpainting")
    body = {"prompt": "a cat", "image": coded(picture((32, 32))), "mask_image": coded(half_white((32, 32)))}
    ((first, second),) = answers(painter, {**body, "parameters": {**FEW, "num_inference_steps": 4}})
    assert first.shape == second.shape == (16, 24, 3)
    (refused,) = painter.handle([request({"prompt": "a"})])
    assert refused.message.startswith("the model serves inpainting, and the request asks for text-to-image")
    changer = started(tiny, **INF2, task="image-to-image")
    (changed,) = answers(changer, {"prompt": "a", "image": coded(picture()), "parameters": {**FEW, "strength": 1}})
    assert changed[0].shape == (16, 24, 3)


def test_compiled_graphs_are_loaded_and_other_sizes_are_refused(neuron: Any, tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "compiled"
    started(tiny, **INF2, save_mp_checkpoint_path=str(target))
    neuron.clear()
    handler = started(target, **INF2)
    assert [arguments["export"] for _, arguments in neuron] == [False]
    body = {"prompt": "a", "parameters": {**FEW, "width": 24, "height": 16}}
    assert answers(handler, body)[0][0].shape == (16, 24, 3)
    wide, narrow = handler.handle([request({**body, "parameters": {**FEW, "width": side}}) for side in (32, 24)])
    assert (
        wide.message == "width and height: 32 x 16 is not allowed; the model was compiled for 24 x 16, leave them out"
    )
    assert isinstance(narrow, Response)
    with pytest.raises(RequestError, match="merge the adapter into the model"):
        handler.add_adapter(Adapter(name="a", directory=str(tmp_path)))
    with pytest.raises(ModelLoadError, match=r"set option\.width=24 in place of 48, or compile it again"):
        started(target, **{**INF2, "width": "48"})
    with pytest.raises(ModelLoadError, match=r"option\.task=inpainting: .* was compiled for text-to-image"):
        started(target, **INF2, task="inpainting")


@pytest.mark.parametrize(
    ("fails", "error", "text"),
    [
        ("device", ModelLoadError, "no Neuron device can be used here: neuron-ls"),
        ("no device", ModelLoadError, "found no Neuron device to load .* on"),
        ("compile", ModelLoadError, "option.neuron_optimize_level=1"),
        ("memory", ModelMemoryError, r"lower option\.height, option\.width, option\.compiled_batch_size"),
    ],
)
@pytest.mark.usefixtures("neuron")
def test_a_failed_load_on_neuron_names_cause_and_remedy(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: type[Exception], text: str
) -> None:
    monkeypatch.setenv("FAKE_NEURONX_FAILS", fails)
    with pytest.raises(error, match=text):
        started(tiny, **INF2)


@pytest.mark.usefixtures("neuron")
def test_a_dead_core_ends_the_process_and_a_client_that_leaves_ends_the_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = started(tiny, **INF2)
    handler.is_cancelled = lambda asked: True
    (gone,) = handler.handle([request({"prompt": "a", "parameters": {"num_inference_steps": 200}})])
    assert str(gone) == "the client is gone"
    handler.is_cancelled = lambda asked: False
    monkeypatch.setenv("FAKE_NEURONX_FAILS", "core")
    with pytest.raises(SystemExit):
        handler.handle([request({"prompt": "a"})])


@pytest.mark.usefixtures("neuron")
def test_a_pipeline_that_neuron_has_no_graphs_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ModelLoadError, match=r"is a FluxPipeline, .* use option\.entryPoint=djl_python"):
        started(tmp_path, **INF2)


def test_the_command_line_compiles_a_pipeline_ahead_of_time(tiny: Path, tmp_path: Path) -> None:
    """What `check` then finds is the missing device alone, and the load compiles nothing."""
    origin, target = tmp_path / "origin", tmp_path / "target"
    write_properties(origin, **INF2, model_id=tiny, env=f"TEST_PACKAGES={FAKE_OPTIMUM_NEURON}")
    fake_neuron_ls = tmp_path / "neuron-ls"
    fake_neuron_ls.write_text(f"#!/bin/sh\ncat {DATA / 'device_tools' / 'neuron_ls.json'}\n")
    fake_neuron_ls.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ("partition", str(origin), "--save", str(target))
    done = run_command(*command, env=variables, cwd=tmp_path, libraries="diffusers")
    assert done.returncode == 0, done.stderr
    assert (target / "unet" / "model.neuron").is_file()
    assert "model_id" not in (target / "serving.properties").read_text()
    with importable(FAKE_OPTIMUM_NEURON, "optimum"):
        from optimum.neuron import calls

        calls.clear()
        started(target)
        assert [(arguments["model_id"], arguments["export"]) for _, arguments in calls] == [(str(target), False)]
