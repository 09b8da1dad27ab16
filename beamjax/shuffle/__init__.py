"""Rows sorted by key, on disk."""
