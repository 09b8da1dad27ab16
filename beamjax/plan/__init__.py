"""The plan: what beamjax runs, as data, and what can be computed from a plan alone."""
