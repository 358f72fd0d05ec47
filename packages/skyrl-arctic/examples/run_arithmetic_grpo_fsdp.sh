#!/usr/bin/env bash
# The twin of run_arithmetic_grpo.sh on the core's own backend: the same file, no backend named.
#
#     bash packages/skyrl-arctic/examples/run_arithmetic_grpo_fsdp.sh [overrides]
set -euo pipefail
cd "$(dirname "$0")/../../.."

uv run --package skyrl-core python -m skyrl.train.entrypoints.main_base \
  @packages/skyrl-core/src/skyrl/train/quickstart/embedded.yaml \
  trainer.run_name=arithmetic-fsdp \
  "$@"
