#!/usr/bin/env bash
# GRPO on GSM8K on one GPU, which trainer and server share: DeepSpeed updates the policy, vLLM samples.
#
#     uv run --package skyrl-core python -m skyrl.train.data.gsm8k --output_dir $HOME/data/gsm8k   # once
#     bash packages/skyrl-arctic/examples/run_gsm8k_grpo_1gpu_colocated.sh [overrides]
#     bash packages/skyrl-arctic/examples/run_gsm8k_grpo_1gpu_colocated.sh --cpu [overrides]   # two small steps, no download
set -euo pipefail
cd "$(dirname "$0")/../../.."

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${NUM_GPUS:=1}"
: "${LOGGER:=wandb}" # "console" prints to stdout
: "${MODEL:=Qwen/Qwen2.5-0.5B-Instruct}"

if [[ "${1:-}" == "--cpu" ]]; then
  shift
  set -- @packages/skyrl-arctic/examples/gsm8k_cpu.yaml "$@"
fi

uv run --package skyrl-arctic train \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.algorithm.advantage_estimator="grpo" \
  trainer.policy.model.path="$MODEL" \
  trainer.placement.colocate_all=true \
  trainer.arctic_rl.zero_stage=2 \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.inference_engine.num_engines="$NUM_GPUS" \
  generator.inference_engine.tensor_parallel_size=1 \
  generator.inference_engine.backend=vllm \
  generator.inference_engine.run_engines_locally=true \
  generator.inference_engine.weight_sync_backend=nccl \
  generator.inference_engine.gpu_memory_utilization=0.5 \
  environment.env_class=gsm8k \
  generator.batched=true \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=1024 \
  trainer.epochs=20 \
  trainer.eval_batch_size=1024 \
  trainer.eval_before_train=true \
  trainer.eval_interval=5 \
  trainer.update_epochs_per_batch=1 \
  trainer.train_batch_size=256 \
  trainer.policy_mini_batch_size=64 \
  trainer.micro_forward_batch_size_per_gpu=16 \
  trainer.micro_train_batch_size_per_gpu=16 \
  trainer.ckpt_interval=10 \
  trainer.max_prompt_length=512 \
  trainer.policy.optimizer_config.lr=1.0e-6 \
  trainer.algorithm.use_kl_loss=true \
  trainer.logger="$LOGGER" \
  trainer.project_name="gsm8k" \
  trainer.run_name="gsm8k-grpo-1gpu-colocated" \
  trainer.resume_mode=latest \
  trainer.ckpt_path="$HOME/ckpts/gsm8k-grpo-1gpu-colocated" \
  "$@"
