"""The plan that beamjax runs, as data, and functions of a plan alone."""
