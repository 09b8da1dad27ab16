"""A run as seen from any process: its state, results and report."""
