"""The work of workers: DoFns, CombineFns, and the errors that they report."""
