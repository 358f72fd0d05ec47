"""What `--help` prints: the grammar, the forms of a server, and every key with its default and its meaning."""

from __future__ import annotations

from typing import Any

from skyrl.train.config import schema
from skyrl.train.config.part import ConfigPart

GRAMMAR = """\
usage: {program} [key=value | @run.yaml] ...

  key=value        trainer.epochs=3   trainer.policy.optimizer_config.lr=1e-6   data.train_data=['a.parquet','b.json']
  @run.yaml        the same keys from a file, nested or dotted; the config.yaml beside a checkpoint is one
                   ${{here}} in a file is the folder that the file lies in
  order            later arguments win over earlier ones, files included
  null             unsets a key; 'quoted' text stays text; ${{other.key}} is replaced by that key's value
  --help WORD      only the keys that contain WORD
  --check          what the run would be: configuration, batches, memory; nothing is started

the rollout server is
  started          generator.inference_engine.backend=vllm (by the servers table), or
                   generator.inference_engine.server_command='my-server --model {{model}} --listen {{listen}}'
  connected to     generator.inference_engine.external_server_urls=['grpc://host:50051']
the trainer backend is trainer.backend=NAME; installed: {backends}
"""


def render(cls: type[ConfigPart], *, program: str, backends: str, word: str = "") -> str:
    """The text of `--help`, or of `--help WORD`: keys of `cls` that contain the word (ValueError if none does)."""
    rows = [
        (".".join(path), _default(field), field.description or "")
        for path, field in schema.leaves(cls)
        if word.lower() in ".".join(path).lower() or (word and word.lower() in (field.description or "").lower())
    ]
    if not rows:
        raise ValueError(f"--help {word}: no key contains {word!r}; --help lists all")
    lines = [f"  {name} = {default}\n      {doc}" for name, default, doc in rows]
    head = "" if word else GRAMMAR.format(program=program, backends=backends) + "\nkeys and defaults:\n"
    return head + "\n".join(lines)


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)
