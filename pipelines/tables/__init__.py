"""Rows of tables shuffled by workers."""
