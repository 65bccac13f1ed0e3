"""`resilient launch [options] -- CMD...`: run a training command under supervision. Imports neither torch nor hydra."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from resilient.cli.argv import Parser, number
from resilient.errors import ExitCode
from resilient.recovery.config import SuperviseConfig
from resilient.recovery.preflight import preflight, probe_command
from resilient.recovery.supervisor import supervise

_DEFAULTS = SuperviseConfig()
_EXAMPLES = """examples:
  resilient launch -- resilient train run.steps=200
  resilient launch -- torchrun --standalone --nproc-per-node 2 -m resilient.cli.train engine=fsdp2
  resilient launch -- deepspeed --num_gpus 2 --module resilient.cli.train engine=deepspeed_zero2
  resilient launch --max-restarts 10 --grace 120 -- python my_training.py
  resilient launch --preflight refuse -- resilient train run.nproc=8
  resilient launch --preflight warn \\
      --preflight-command "torchrun --nnodes 4 ... -m resilient.cli.probe" -- torchrun --nnodes 4 ... train.py

exit codes: 0 done; 64 bad configuration; 76 a restart on other hosts is needed; 77 a person is needed (also when the
restart budget is used up, or the preflight refuses); 78 pre-empted, resumable; after TERM or INT otherwise the command's own code
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilient launch",
        usage="resilient launch [options] -- CMD ...",
        description="Run a training command and restart it from its last checkpoint when it dies.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--max-restarts",
        type=number(int, 0),
        default=_DEFAULTS.max_restarts,
        metavar="N",
        help="restarts in a row without a checkpoint of a later step (default %(default)s)",
    )
    parser.add_argument(
        "--backoff",
        type=number(float, 0),
        default=_DEFAULTS.backoff_s,
        metavar="S",
        help="seconds before the first restart in a row, doubling with each (default %(default)s)",
    )
    parser.add_argument(
        "--run-id",
        metavar="ID",
        help="name of the run, the same over restarts (default: RESILIENT_RUN_ID, or a fresh one)",
    )
    parser.add_argument(
        "--grace",
        type=number(float, 0),
        default=_DEFAULTS.grace_s,
        metavar="S",
        help="seconds to finish after TERM or INT; must exceed the time of a save (default %(default)s)",
    )
    parser.add_argument(
        "--preflight",
        choices=("off", "warn", "refuse"),
        default="off",
        help="probe links and machines before the first start; refuse: do not start when something is found (default off)",
    )
    parser.add_argument(
        "--preflight-seconds",
        type=number(float, 0),
        default=10.0,
        metavar="S",
        help="time of that probe (default %(default)s)",
    )
    parser.add_argument(
        "--preflight-command",
        metavar="CMD",
        help="the probe as the job's own launcher starts it (default: resilient probe in this environment, or on the "
        "devices of this machine)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command after `--`. Returns the exit code; raises SystemExit(64) for unusable arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options = parser.parse_args(arguments[:split])
    command = arguments[split + 1 :]
    if not command:
        parser.error("no command to run: put it after --, as in: resilient launch -- resilient train run.steps=200")
    config = SuperviseConfig(max_restarts=options.max_restarts, backoff_s=options.backoff, grace_s=options.grace)
    probe = probe_command(options.preflight_command, options.preflight_seconds)
    code = preflight(options.preflight, probe, options.preflight_seconds, _say)
    if code != ExitCode.DONE:
        return int(code)
    return supervise(command, config, options.run_id)


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
