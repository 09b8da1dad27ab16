"""Builds the Beam graph of a plan."""
