"""Generates and scores `data.val_data` once: `python -m skyrl.train.entrypoints.main_generate key=value ... @run.yaml`.

The plain entrypoint with `trainer.mode=generate`: no trainer, no publish; servers are started or connected to as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.train.entrypoints import main_base
from skyrl.train.entrypoints.public_names import selected_by


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the arguments (unset: the process's own); ends as `main_base.main` does."""
    main_base.main(argv, before=lambda given: [*selected_by("skyrl.train.entrypoints.main_generate"), *given])


if __name__ == "__main__":
    main()
