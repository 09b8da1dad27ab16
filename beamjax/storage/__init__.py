"""Bytes and files: arrays, small records, caches and scratch files. It knows no program."""
