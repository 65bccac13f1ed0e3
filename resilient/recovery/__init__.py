"""Outside the training process: starting ranks, watching them, and starting them again from the last checkpoint."""
