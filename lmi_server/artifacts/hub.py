"""Fetches a model from the Hugging Face Hub into the cache of huggingface_hub, which other tools share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmi_server.artifacts.progress import Activity
from lmi_server.contract.errors import ArtifactError

# Weights of other frameworks, and formats that no engine here reads.
_FOREIGN = ("*.msgpack", "*.h5", "*.ot", "*.onnx", "*.mlmodel", "onnx/*", "openvino/*", "coreml/*", "original/*")
_PICKLED = ("pytorch_model*.bin",)


def fetch_hub_model(repo_id: str, revision: str | None, activity: Activity) -> Path:
    """Fetch a snapshot of the model and return its directory.

    `revision` is a branch, a tag or a commit; None is the main branch. Without network, or with HF_HUB_OFFLINE, the
    cached snapshot is used. Raises ArtifactError.
    """
    if find_spec("huggingface_hub") is None:
        raise ArtifactError(
            f"{repo_id}: models of the Hugging Face hub need huggingface_hub, which is not installed: "
            'pip install "lmi-server[hub]"'
        )
    activity.report(f"fetching {repo_id} from the Hugging Face hub")
    # Many models have their weights twice, as safetensors and pickled: the pickled copy would double the download.
    directory = _snapshot(repo_id, revision, (*_FOREIGN, *_PICKLED), activity)
    if not list(directory.glob("*.safetensors")):
        directory = _snapshot(repo_id, revision, _FOREIGN, activity)
    return directory


def _snapshot(repo_id: str, revision: str | None, ignored: tuple[str, ...], activity: Activity) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        # The library itself finds HF_TOKEN and the token of `hf auth login`.
        found = snapshot_download(
            repo_id, revision=revision, ignore_patterns=list(ignored), tqdm_class=_progress_bar(repo_id, activity)
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
    "give this machine access to the hub (HF_ENDPOINT names another one) and unset HF_HUB_OFFLINE, "
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
