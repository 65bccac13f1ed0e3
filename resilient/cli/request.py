"""`resilient request RUN ACTION [--reason TEXT] [--wait S]`: ask a live run for something, through a file in its directory.

ACTION: checkpoint (save at the next step boundary) | stop (leave there, saved, exit code 78) | rollback (to the newest
snapshot that can be trusted) | rollback=STEP (to one before that step) | lr=FACTOR (multiply the learning rate, until lr=1)
| note=TEXT (a line in the journal). The run looks once a second, and answers in its journal.
"""

from __future__ import annotations

import argparse
import sys

from resilient.checkpoint.files import wait_until
from resilient.coordinator.requests import parse_action, read_outcome, write_request
from resilient.errors import ConfigError, ExitCode

_NOT_DONE, _NO_ANSWER = 1, 2


def main(argv: list[str]) -> int:
    """Write the request. 0 when written (with --wait: when done), 1 refused or failed, 2 no answer in time, 64 not written."""
    parser = argparse.ArgumentParser(
        prog="resilient request", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    parser.add_argument("action", metavar="ACTION")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the journal")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="longest wait for the answer (default 0)")
    options = parser.parse_args(argv)
    try:
        request = write_request(options.run, parse_action(options.action), reason=options.reason)
    except ConfigError as error:
        print(f"resilient request: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    print(f"request {request.id}: {request.action}")
    if options.wait <= 0:
        return ExitCode.DONE
    if not wait_until(lambda: read_outcome(options.run, request.id) is not None, options.wait):
        print(f"no answer within {options.wait:g} s: the run does not run, or its step is longer", file=sys.stderr)
        return _NO_ANSWER
    answer = read_outcome(options.run, request.id)
    assert answer is not None
    outcome, message = answer
    print(f"{outcome}: {message}")
    return ExitCode.DONE if outcome == "done" else _NOT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
