"""Where the server's environment and the models of a bench are; what to do where they are missing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER_BINARIES = ROOT / ".venvs/server/bin"
TINY_MODEL = ROOT / "packages/skyrl-core/src/skyrl/train/quickstart/tiny_model"
SMOLLM2 = ROOT / ".skyrl/models/SmolLM2-135M-Instruct"


def server_binary(name: str) -> Path:
    """A program of the server's environment. Raises FileNotFoundError saying how to make it."""
    path = SERVER_BINARIES / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: `uv run tools/serve.py --sync-only` makes the environment")
    return path


def smollm2() -> Path:
    """The model of 0.54 GB. Raises FileNotFoundError saying how to get it."""
    if not (SMOLLM2 / "model.safetensors").is_file():
        raise FileNotFoundError(f"{SMOLLM2} is not there: `uv run tools/fetch_smollm2.py` fetches it")
    return SMOLLM2
