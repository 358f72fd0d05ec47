"""The DeepSpeed policy backend."""
