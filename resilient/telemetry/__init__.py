"""What is written and shown: run directory, journal, progress, report, comparison. Nothing here steers a run."""
