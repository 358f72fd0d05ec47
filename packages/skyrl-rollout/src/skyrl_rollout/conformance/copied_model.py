"""A model folder like another, with some of its JSON changed, so that a check can see who obeys it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Sampling defaults of a model folder that a server must leave unread.
FAR_FROM_DEFAULT = {
    "do_sample": True, "temperature": 0.01, "top_p": 0.8, "top_k": 1, "repetition_penalty": 1.5, "max_new_tokens": 3,
}  # fmt: skip


@contextmanager
def copied_model(model: Path, **changed: Mapping[str, object]) -> Iterator[Path]:
    """A folder of links to the files of `model`; `generation_config={...}` adds to that JSON file."""
    with tempfile.TemporaryDirectory(prefix="skyrl-conformance-") as made:
        folder = Path(made) / model.resolve().name
        folder.mkdir()
        for path in model.resolve().iterdir():
            if path.stem not in changed:
                (folder / path.name).symlink_to(path)
        for stem, values in changed.items():
            path = model / f"{stem}.json"
            said = json.loads(path.read_text()) if path.exists() else {}
            (folder / path.name).write_text(json.dumps({**said, **values}))
        yield folder
