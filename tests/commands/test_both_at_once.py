"""Do `train` and `arctic-serve` get on in one clone: one after the other, the other way round, and at the same time?"""

from pathlib import Path

import pytest
from fresh_clone import FreshClone

SERVE = (
    "uv run --package skyrl-arctic-inference --extra cpu arctic-serve "
    "--model packages/skyrl-core/src/skyrl/train/quickstart/tiny_model --listen 127.0.0.1:0"
)
TRAIN = "uv run --package skyrl-arctic train trainer.max_training_steps=2 trainer.eval_before_train=false"
READY = "ready url="


def serve(clone: FreshClone) -> None:
    with clone.background(SERVE, until=READY, timeout_s=900):
        pass


def train(clone: FreshClone) -> None:
    clone.run(TRAIN, timeout_s=900).ok()


ORDERS = {"train first": (train, serve), "server first": (serve, train)}


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("order", ORDERS)
def test_one_after_the_other_from_nothing(tmp_path: Path, order: str) -> None:
    clone = FreshClone(tmp_path / "clone")
    try:
        for command in ORDERS[order]:
            command(clone)
        assert clone.leftovers() == []
    finally:
        clone.remove()


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_at_the_same_time_from_nothing(tmp_path: Path) -> None:
    clone = FreshClone(tmp_path / "clone")
    try:
        with clone.background(TRAIN, until="", timeout_s=1) as trainer:
            serve(clone)
            assert trainer.wait(900) == 0
        assert clone.leftovers() == []
    finally:
        clone.remove()
