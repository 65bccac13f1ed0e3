#!/usr/bin/env bash
# One host, the deepspeed launcher under supervision:   NPROC=8 launch/deepspeed.sh engine=deepspeed_zero2 run.steps=1000
# Options of `resilient launch` go into LAUNCH_OPTIONS:   LAUNCH_OPTIONS="--max-restarts 10 --grace 120"
# On a machine without an accelerator: DS_ACCELERATOR=cpu NPROC=2 launch/deepspeed.sh ...
set -euo pipefail

NPROC=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count() or 1)')}
# The launcher's default port is the same for every job on this host; take a free one.
MASTER_PORT=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
read -r -a options <<<"${LAUNCH_OPTIONS:-}"

exec resilient launch ${options[@]+"${options[@]}"} -- \
  deepspeed --num_gpus "$NPROC" --master_port "$MASTER_PORT" --module resilient.cli.train "$@"
