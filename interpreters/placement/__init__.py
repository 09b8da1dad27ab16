"""Placement: finds out which values are server values and which are placed."""
