"""A deterministic rollout engine in numpy: no model, every promise of the protocol."""
