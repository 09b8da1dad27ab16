"""Sources of unknown length."""
