"""The guard where people already are: their own training loop."""
