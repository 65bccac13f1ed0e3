"""What is kept of a fault: the scene of a refused step."""
