"""A run as any process sees it: its state, results and report."""
