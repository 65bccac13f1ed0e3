"""`python -m resilient` is the `resilient` command."""

import sys

from resilient.cli.main import main

sys.exit(main())
