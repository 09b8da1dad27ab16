"""Saves the state of a run to checkpoints, and restores it."""
