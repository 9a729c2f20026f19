"""Fetches a model from the Hugging Face Hub into the cache of huggingface_hub, which other tools share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmi_server.artifacts.location import HubModel
from lmi_server.artifacts.progress import Activity
from lmi_server.contract.errors import ArtifactError

# Weights of other frameworks, and formats that no engine here reads.
# Of the copies in GGUF, one for each precision, at most one is wanted.
_FOREIGN = (
    "*.msgpack",
    "*.h5",
    "*.ot",
    "*.onnx",
    "*.mlmodel",
    "*.ckpt",
    "onnx/*",
    "openvino/*",
    "coreml/*",
    "original/*",
    "*.gguf",
)
_PICKLED = ("pytorch_model*.bin", *(f"{part}*/*pytorch_model*.bin" for part in ("unet", "vae", "text_", "safety_")))


def fetch_hub_model(model: HubModel, revision: str | None, activity: Activity) -> Path:
    """Fetch a snapshot of the model and return its directory, or its file in GGUF if it has no other weights.

    `revision` is a branch, a tag or a commit; None is the main branch. Without network, or with HF_HUB_OFFLINE, the
    cached snapshot is used. Raises ArtifactError.
    """
    repo_id = model.repo_id
    if find_spec("huggingface_hub") is None:
        raise ArtifactError(
            f"{repo_id}: models of the Hugging Face hub need huggingface_hub, which is not installed: "
            'pip install "lmi-server[hub]"'
        )
    activity.report(f"fetching {repo_id} from the Hugging Face hub")
    if model.quantization is not None:
        return _gguf(model, revision, activity)
    # Many models have their weights twice, as safetensors and pickled: the pickled copy would double the download.
    directory = _snapshot(repo_id, revision, activity, ignored=[*_FOREIGN, *_PICKLED])
    if (directory / "model_index.json").is_file():  # diffusers loads only the safetensors of a pipeline
        return directory
    if not list(directory.glob("*.safetensors")):
        directory = _snapshot(repo_id, revision, activity, ignored=[*_FOREIGN])
    if not (directory / "config.json").is_file() and not any(directory.glob("*.bin")):
        return _gguf(model, revision, activity, otherwise=directory)
    return directory


def _gguf(model: HubModel, revision: str | None, activity: Activity, otherwise: Path | None = None) -> Path:
    """Fetch the one file in GGUF that `model` names, and return its path; `otherwise` if the model has none."""
    part = model.quantization or ""
    names = _list_gguf(model.repo_id, revision)
    if names is None:
        cached = _snapshot(model.repo_id, revision, activity, allowed=[f"*{part}*.gguf", f"*{part.upper()}*.gguf"])
        names = [str(path.relative_to(cached)) for path in cached.rglob("*.gguf")]
    if not names and otherwise is not None:
        return otherwise
    chosen = [name for name in names if part.lower() in name.lower()]
    if len(chosen) != 1:
        listed = ", ".join(sorted(chosen or names)) or "none"
        raise ArtifactError(
            f"{model.id}: names {len(chosen)} files in GGUF, and one is served; name the model as "
            f"{model.repo_id}:PART with a part of one file's name; of {listed}"
        )
    return _snapshot(model.repo_id, revision, activity, allowed=chosen) / chosen[0]


def _list_gguf(repo_id: str, revision: str | None) -> list[str] | None:
    """Return the files in GGUF that the hub lists; None if it cannot be asked."""
    from huggingface_hub import HfApi

    try:
        # Not list_repo_files: without a network, that tries for twenty seconds.
        files = HfApi().model_info(repo_id, revision=revision).siblings or []
    except Exception:  # noqa: BLE001 - the border to the hub's library, which raises what its HTTP client raises
        return None
    names = [file.rfilename for file in files]
    return [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]


def _snapshot(
    repo_id: str,
    revision: str | None,
    activity: Activity,
    ignored: list[str] | None = None,
    allowed: list[str] | None = None,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        # The library itself finds HF_TOKEN and the token of `hf auth login`.
        found = snapshot_download(
            repo_id,
            revision=revision,
            ignore_patterns=ignored,
            allow_patterns=allowed,
            tqdm_class=_progress_bar(repo_id, activity),
        )
    # HfHubHTTPError, LocalEntryNotFoundError (no network, nothing cached) and a full disk are all OSErrors.
    except (OSError, HFValidationError) as error:
        raise _hub_error(repo_id, revision, error) from error
    return Path(found)


def _hub_error(repo_id: str, revision: str | None, error: Exception) -> ArtifactError:
    from huggingface_hub import errors

    remedies: dict[type[Exception], str] = {
        errors.GatedRepoError: (
            "the model is gated; accept its licence on the hub and set HF_TOKEN to a token of that account"
        ),
        errors.RepositoryNotFoundError: (
            "there is no such directory, and the hub has no such model, or it is private; check the name, "
            "or set HF_TOKEN to a token that may read it"
        ),
        errors.RevisionNotFoundError: f"the model has no revision {revision!r}; check option.revision",
        errors.IncompleteSnapshotError: "the hub cannot be reached, and the cached copy is incomplete; " + _CONNECT,
        errors.LocalEntryNotFoundError: "the hub cannot be reached, and the model is not in the cache; " + _CONNECT,
        errors.HFValidationError: "is no valid model id; check the name",
    }
    for kind, remedy in remedies.items():
        if isinstance(error, kind):
            return ArtifactError(f"{repo_id}: {remedy}")
    return ArtifactError(f"{repo_id}: cannot be fetched from the Hugging Face hub: {error}")


_CONNECT = (
    "give this machine access to the hub (HF_ENDPOINT names another hub) and unset HF_HUB_OFFLINE, "
    "or copy the model here and set option.model_id to its directory"
)


def _progress_bar(repo_id: str, activity: Activity) -> Any:
    """Return a class of progress bars that draws nothing and reports bytes to `activity`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The library makes three bars: of files, of bytes received, and this one, of bytes written.
            self._shown = kwargs.get("name") == "huggingface_hub.snapshot_download"
            # Disabled, tqdm draws nothing and counts nothing, so that `update` counts here.
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self._done = float(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            activity.check()
            self._done += n or 0
            if self._shown:
                total = int(self.total) if self.total else None
                activity.report(f"fetching {repo_id} from the Hugging Face hub", int(self._done), total)
            return None

    return Reporting
