"""`resilient drill NAME ...`: rehearses failures on this machine; each drill is a module of resilient.bench.drill."""

from __future__ import annotations

import sys
from importlib import import_module

from resilient.cli.errors import did_you_mean, fail
from resilient.errors import ConfigError

DRILLS = {
    "checkpoint": (
        "resilient.bench.drill.run",
        "kills, damage and full disks while checkpoints are saved, deleted and loaded",
    ),
}


def main(argv: list[str]) -> int:
    """Run one drill with the rest of the words. Non-zero when a bound that it states is missed, 64 for a wrong name."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, DRILLS))
        print("usage: resilient drill NAME ...\n")
        print("\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in DRILLS.items()))
        return 0 if argv else fail(ConfigError(f"drill: name one of {', '.join(DRILLS)}"))
    if argv[0] not in DRILLS:
        return fail(ConfigError(f"drill {argv[0]}: unknown drill{did_you_mean(argv[0], DRILLS)}"))
    module, _ = DRILLS[argv[0]]
    return int(import_module(module).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
