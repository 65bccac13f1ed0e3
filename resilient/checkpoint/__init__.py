"""Captured state: snapshots in memory, checkpoints on disk, and the proof that a restore is exact."""
