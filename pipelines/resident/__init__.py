"""Resident workers: one Beam job serves all rounds of a program, or all calls of a session."""
