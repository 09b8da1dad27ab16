"""Hostile bytes for everything that reads what another process, or a disk, may have changed."""
