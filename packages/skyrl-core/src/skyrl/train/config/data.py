"""Which prompts are trained and evaluated on (`data.*`)."""

from __future__ import annotations

from pydantic import Field

from skyrl.train.config.part import ConfigPart, Texts, key, section


class DataLoaderConfig(ConfigPart):
    """How rows are read (`data.dataloader.*`)."""

    num_workers: int | None = key(
        0,
        "Processes that read rows; 0 reads them in the trainer.",
        theirs=8,
        reason="rows are held in memory: eight processes cost start-up time and gain nothing",
        ge=0,
    )
    persistent_workers: bool = key(False, "Keep the reading processes between epochs.")


class DataConfig(ConfigPart):
    """Prompts (`data.*`): .parquet, .json or .jsonl files, folders, or names of data sets on the Hugging Face hub, the
    last two as name[:split]; several are concatenated in order."""

    train_data: Texts = Field(("~/data/gsm8k/train.parquet",), description="Training prompts.")
    val_data: Texts = Field(("~/data/gsm8k/validation.parquet",), description="Evaluation prompts.")
    dataloader: DataLoaderConfig = section(DataLoaderConfig)
