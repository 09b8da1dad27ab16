"""A plan as JSON and text, its memory, and the pages of a plan and of a run."""
