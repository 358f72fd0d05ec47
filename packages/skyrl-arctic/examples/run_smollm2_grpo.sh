#!/usr/bin/env bash
# 9 steps of GRPO on a real chat model without a model hub or a GPU: SmolLM2-135M-Instruct in float32, rollouts on vLLM,
# updates on DeepSpeed. Needs about 8 GB of memory.
#
#     bash packages/skyrl-arctic/examples/run_smollm2_grpo.sh [overrides]
set -euo pipefail
cd "$(dirname "$0")/../../.."

MODEL=.skyrl/models/SmolLM2-135M-Instruct
DATA=.skyrl/data/chat_sums

uv run tools/fetch_smollm2.py
uv run --package skyrl-arctic python packages/skyrl-arctic/examples/make_chat_sums.py "$DATA"

uv run --package skyrl-arctic train \
  trainer.policy.model.path="$MODEL" \
  data.train_data="['$DATA/train.jsonl']" \
  data.val_data="['$DATA/eval.jsonl']" \
  environment.env_class=gsm8k \
  trainer.device=cpu \
  trainer.arctic_rl.zero_stage=2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=false \
  trainer.policy.optimizer_config.lr=1e-5 \
  trainer.policy.optimizer_config.max_grad_norm=1.0 \
  trainer.max_training_steps=9 \
  trainer.train_batch_size=4 \
  trainer.policy_mini_batch_size=4 \
  trainer.micro_train_batch_size_per_gpu=8 \
  trainer.micro_forward_batch_size_per_gpu=16 \
  trainer.gradient_checkpointing=false \
  trainer.max_prompt_length=256 \
  trainer.eval_before_train=false \
  trainer.eval_interval=-1 \
  trainer.ckpt_interval=9 \
  trainer.hf_save_interval=9 \
  trainer.logger=tensorboard \
  trainer.project_name=smollm2 \
  trainer.run_name=chat-sums \
  generator.n_samples_per_prompt=4 \
  generator.sampling_params.temperature=1.0 \
  generator.sampling_params.max_generate_length=12 \
  generator.inference_engine.backend=vllm \
  generator.inference_engine.enforce_eager=true \
  generator.inference_engine.max_num_seqs=16 \
  generator.inference_engine.engine_init_kwargs.max_model_len=512 \
  "$@"
