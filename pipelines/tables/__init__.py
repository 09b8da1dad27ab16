"""Pipelines without a plan: shuffles, and streams that are read into files."""
