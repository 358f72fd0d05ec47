#!/usr/bin/env bash
# The embedded run on DeepSpeed, ZeRO stage 2: a tiny model learns sums against a vLLM server that the run starts.
#
#     bash packages/skyrl-arctic/examples/run_arithmetic_grpo.sh [overrides]
set -euo pipefail
cd "$(dirname "$0")/../../.."

uv run --package skyrl-arctic train \
  trainer.arctic_rl.zero_stage=2 \
  trainer.run_name=arithmetic-deepspeed \
  "$@"
