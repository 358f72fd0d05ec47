"""Are the names that scripts of users import where the public project has them?"""

import importlib

import pytest

NAMES = {
    "skyrl.train.config": ("SkyRLTrainConfig", "TrainerConfig", "make_config"),
    "skyrl.train.trainer": ("RayPPOTrainer",),
    "skyrl.train.entrypoints.main_base": ("BasePPOExp",),
    "arctic_rl.config": (
        "ArcticRLTrainerConfig", "ArcticTrainerConfig", "ArcticSkyRLConfig", "ArcticRLClientConfig", "build_rl_config",
    ),
    "arctic_rl.entrypoint": ("main",),
    "arctic_rl.trainer": ("ArcticPPOTrainer",),
    "arctic_rl.generator": ("ArcticGenerator",),
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_a_public_name_imports(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
