"""The benchmarks that back the figures in README and docs."""
