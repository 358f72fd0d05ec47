"""How a vLLM worker meets a trainer, receives its weights, and leaves."""

from __future__ import annotations

from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from skyrl_arctic_inference.engine.transfers import TrainerWeights, registered


class TransfersExtension:
    """Methods that `collective_rpc` calls by name in every worker."""

    model_runner: Any
    vllm_config: Any
    device: Any

    def join_transfer(self, backend: str, meeting: dict[str, Any]) -> None:
        """Meets the trainer, which listens; does not wait for it to enter."""
        self.leave_transfer()
        config = WeightTransferConfig(backend=registered(backend))
        engine = WeightTransferEngineFactory.create_engine(
            config, self.vllm_config, self.device, self.model_runner.get_model()
        )
        assert isinstance(engine, TrainerWeights)
        engine.runner = self.model_runner
        engine.init_transfer_engine(engine.parse_init_info(meeting))
        self._transfer = engine

    def receive_transfer(self, tensors: dict[str, Any]) -> None:
        """The bytes go straight into the live weights; the scheduler is paused."""
        self._transfer.update_weights(tensors)

    def leave_transfer(self) -> None:
        """Ends what `join_transfer` began; a no-op where nothing was."""
        if hasattr(self, "_transfer"):
            self._transfer.shutdown()
            del self._transfer
