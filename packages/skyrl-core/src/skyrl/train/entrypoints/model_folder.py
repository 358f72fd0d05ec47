"""From the name of a model to a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def model_folder(name: str, *, key: str) -> Path:
    """The folder itself, or the hub's snapshot of it, downloaded where it is not cached.

    ValueError names the key where neither is there.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        pass  # not cached: ask the hub
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, etag_timeout=10))
    except (RepositoryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{key}={name}: no such folder here, and the model hub did not give it ({reason}); give the folder of a "
            f"Hugging Face checkpoint"
        ) from error
