"""Logs: readers for training logs that others wrote, and the analysis of what they say. No torch."""
