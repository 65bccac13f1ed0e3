"""The step loop: exchange, judge, act, commit, the same on every rank. Start with coordinator.py."""
