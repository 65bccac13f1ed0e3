"""`resilient bench NAME ...`: the benchmarks behind the figures in README and docs; each is a module of resilient.bench."""

from __future__ import annotations

import sys
from importlib import import_module

from resilient.cli.errors import did_you_mean, fail
from resilient.errors import ConfigError

BENCHES = {
    "detection": (
        "resilient.bench.detection.run",
        "early warning: public alarm rules and this project's, side by side",
    ),
    "attribution": (
        "resilient.bench.attribution.run",
        "which rank, and why: injected faults in every engine against what the guard says of them",
    ),
    "overhead": ("resilient.bench.overhead", "what the guard costs per step"),
    "checkpoint": (
        "resilient.bench.checkpoint",
        "how long a save holds training up, and when it is done: against DeepSpeed's and torch's own",
    ),
    "rollback": (
        "resilient.bench.rollback",
        "how long the way back takes: memory, peer, disk, the engines' own loads, a new start",
    ),
}


def main(argv: list[str]) -> int:
    """Run one benchmark with the rest of the words. Non-zero when a bound that it states is missed, 64 for a wrong name."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHES))
        print("usage: resilient bench NAME ...\n")
        print("\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in BENCHES.items()))
        return 0 if argv else fail(ConfigError(f"bench: name one of {', '.join(BENCHES)}"))
    if argv[0] not in BENCHES:
        return fail(ConfigError(f"bench {argv[0]}: unknown benchmark{did_you_mean(argv[0], BENCHES)}"))
    module, _ = BENCHES[argv[0]]
    return int(import_module(module).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
