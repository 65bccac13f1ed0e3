import sys

from resilient.bench.detection.run import main

sys.exit(main())
