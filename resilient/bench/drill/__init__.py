"""Drills: what is promised for the worst moment, tried at many seeded worst moments."""
