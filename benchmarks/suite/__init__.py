"""The benchmark suite: workloads A to H by beamjax and by its peers, in one run.

    python -m benchmarks.suite --cases A B --json suite.json --page docs/benchmarks-suite.md

Files: `cases/` has the workloads, one file each; `ways/` the ways to compute them; `server` is the
process that a way has to itself, `launcher` asks these in turn; `measure` makes the rows of a
table, `scale` and `model` what comes after it, `bar` says what is met, `page` writes it all down.
"""
