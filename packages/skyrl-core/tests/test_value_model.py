"""What a critic starts from: a trunk, and a head of its own or of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.contract_suite import random_minibatch, spec, tiny_model
from skyrl.train.policy.critic import CriticGroup
from skyrl.train.policy.critic_suite import HEAD, taught, tiny_critic
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.value_model import stored_tensor


@contextmanager
def critic_of(model: Path, *, seed: int = 42, critic: dict[str, Any] | None = None, **algorithm: Any) -> Iterator[Any]:
    """(the critic, its configuration): one that starts from `model`, with these keys under trainer.critic."""
    trainer = {
        "device": "cpu",
        "seed": seed,
        "critic": {"model": {"path": str(model)}} | (critic or {}),
        "algorithm": {"advantage_estimator": "gae", "use_kl_loss": False} | algorithm,
    }
    cfg = SkyRLTrainConfig.model_validate({"trainer": trainer})
    group = CriticGroup.create(cfg, PLUGIN, "critic", total_steps=10)
    try:
        yield group, cfg
    finally:
        group.close()


def weights(model: Path, **keys: Any) -> dict[str, torch.Tensor]:
    with critic_of(model, **keys) as (critic, _cfg):
        return critic.weights()


def test_the_head_of_the_checkpoint_is_taken_by_its_name_and_another_is_drawn_by_the_seed(tmp_path: Path) -> None:
    model = tiny_critic(tmp_path)
    stored = load_file(model / "model.safetensors")
    assert torch.equal(weights(model)[HEAD], stored[HEAD])
    drawn = weights(model, value_head_prefix="score")
    assert torch.equal(weights(model, value_head_prefix="score")["score.weight"], drawn["score.weight"])
    assert not torch.equal(weights(model, value_head_prefix="score", seed=7)["score.weight"], drawn["score.weight"])
    assert set(drawn) == set(stored) - {HEAD} | {"score.weight"}


def test_a_head_is_found_in_the_shards_of_a_checkpoint(tmp_path: Path) -> None:
    save_file({"score.weight": torch.ones(1, 4)}, tmp_path / "b.safetensors")
    index = '{"weight_map": {"score.weight": "b.safetensors", "x": "a.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    found = stored_tensor(str(tmp_path), "score.weight")
    assert found is not None and torch.equal(found, torch.ones(1, 4))
    assert stored_tensor(str(tmp_path), "value_head.weight") is None


def test_a_head_that_does_not_fit_and_a_name_that_is_taken_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {HEAD: torch.zeros(3, 64)}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"value_head\.weight is \[3, 64\], a value head here is \[1, 64\]"):
        weights(model)
    with pytest.raises(ValueError, match="value_head_prefix=model is the name of the model's trunk"):
        weights(model, value_head_prefix="model")


def test_a_checkpoint_without_its_trunk_is_refused_with_the_critics_key(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"trainer\.critic\.model\.path={model}: .* norm\.weight is not there"):
        weights(model)


@pytest.mark.ci
def test_settings_of_the_critics_optimizer_reach_it(tmp_path: Path) -> None:
    model, batch = tiny_critic(tmp_path), taught(random_minibatch(6))

    def after_two(**optimizer: Any) -> torch.Tensor:
        with critic_of(model, critic={"optimizer_config": {"lr": 1e-3} | optimizer}) as (critic, cfg):
            for _ in range(2):
                critic.update(batch, spec(cfg))
            return critic.weights()[HEAD]

    base = after_two()
    for changed in (
        {"lr": 1e-4}, {"adam_betas": [0.5, 0.9]}, {"weight_decay": 0.5}, {"max_grad_norm": 1e-9},
        {"num_warmup_steps": 5}, {"scheduler": "cosine"},
    ):  # fmt: skip
        assert not torch.equal(after_two(**changed), base), changed
    with pytest.raises(ValueError, match=r"trainer\.critic\.optimizer_config\.scheduler.*zigzag"):
        after_two(scheduler="zigzag")


def test_precision_and_sharding_of_the_critic_are_its_own(tmp_path: Path) -> None:
    model, batch = tiny_critic(tmp_path), taught(random_minibatch(6))

    def values(**critic: Any) -> torch.Tensor:
        with critic_of(model, critic={"model": {"path": str(model)}} | critic) as (group, _cfg):
            return group.values(batch)

    base = values()
    assert values(model_config_kwargs={"dtype": "float64"}).dtype == torch.float64
    rounded = values(fsdp_config={"mixed_precision": {"param_dtype": "bf16"}})
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, base)
    assert torch.allclose(rounded, base, atol=0.1)
    assert torch.allclose(values(fsdp_config={"cpu_offload": True}), base, atol=1e-6)
    with pytest.raises(ValueError, match="fsdp_size=3 must divide the 1"):
        values(fsdp_config={"mixed_precision": {}, "fsdp_size": 3})
