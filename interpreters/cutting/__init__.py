"""Cuts a program into stages, which run in order."""
