"""How far rollouts may run ahead of training (`trainer.fully_async.*`)."""

from __future__ import annotations

from skyrl.train.config.part import ConfigPart, key


class FullyAsyncConfig(ConfigPart):
    """`trainer.fully_async.*`: rollouts are made all the time, while the policy trains on earlier ones."""

    enabled: bool = key(False, "The public spelling of trainer.mode=fully_async.")
    max_staleness_steps: int = key(
        4,
        "Steps that the policy may have moved on since the oldest token of a group; an older group is sampled anew.",
        ge=0,
    )
    num_parallel_generation_workers: int = key(768, "Groups that are made at the same time at most.", ge=1)
    sample_full_batch: bool = key(
        False, "Groups that the zero-variance filter would mask are dropped; others are sampled in their place."
    )
    clear_kv_cache_on_weight_sync: bool = key(
        False, "Running samples recompute their KV under new weights; false: they keep it."
    )
    simulate_training: bool = key(False, "Sleep instead of training; the weights that are published do not change.")
    simulate_training_step_seconds: float = key(30.0, "Seconds that one simulated update takes.", ge=0)
    simulate_weight_sync_seconds: float = key(0.0, "Seconds that a simulated publish takes longer.", ge=0)
