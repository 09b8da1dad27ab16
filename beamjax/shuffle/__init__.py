"""Rows on disk, sorted by key."""
