"""The work of workers: DoFns, CombineFns, and how their errors travel."""
