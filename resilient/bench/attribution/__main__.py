import sys

from resilient.bench.attribution.run import main

sys.exit(main())
