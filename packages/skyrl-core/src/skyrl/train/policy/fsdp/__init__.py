"""The default policy backend: a transformers model sharded with FSDP2, trained with AdamW."""
