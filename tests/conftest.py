"""For the whole suite, before it starts its first process."""

from __future__ import annotations

import os
import sys

# Some two hundred processes import the package: each would compile it anew, 0.6 s of the 3.4 s that it takes to start one.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
