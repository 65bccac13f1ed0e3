#!/usr/bin/env bash
# One host, torchrun under supervision:   NPROC=8 launch/torchrun.sh engine=fsdp2 run.steps=1000
# Options of `resilient launch` go into LAUNCH_OPTIONS:   LAUNCH_OPTIONS="--max-restarts 10 --grace 120"
set -euo pipefail

NPROC=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count() or 1)')}
read -r -a options <<<"${LAUNCH_OPTIONS:-}"

# --max-restarts 0: one place counts restarts. torchrun would restart ranks without asking what the verdict says.
# --standalone: a free port for each start, so that a restart never meets the socket of its predecessor.
exec resilient launch ${options[@]+"${options[@]}"} -- \
  torchrun --standalone --nproc-per-node "$NPROC" --max-restarts 0 -m resilient.cli.train "$@"
