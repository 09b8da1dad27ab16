"""The page of results: tables and plots from what was measured, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite import bar, model
from benchmarks.suite.cases import CASES
from benchmarks.suite.ways import ALL, DIRECT, LOCAL

HEAD = """\
# Benchmark suite

This page is written by `python -m benchmarks.suite` from what one run of it measured; only the
reasons in the section on the bar are kept by hand. All ways of a workload have a process of their
own, or a cluster of processes on this machine, which stays alive; they are asked for a round in
turn, so that a busy machine hurts all of them alike. Seconds are the median of the rounds after the
first call; imports, the start of clusters, compiling and warming up are not in them. All ways read
the same files, which are in the memory of the system, and are compared with the answer of the first
one.

- *x loop*: seconds over those of the shard loop, the ideal: a jitted function over shards in one
  process, each of as many members as beamjax computes at once, summed in float64.
- *first*: seconds of the first call, with staging and compiling.
- *peak* and *start*: MiB that the process and its children have for themselves, at most and before
  the first call; files that are mapped are not in it. *peak* is that of all rounds.
- *differs*: from the first way's answer, largest difference of a leaf over its largest number.
- *predicted*: seconds that `bj.explain` tells of it where the machine was not measured. What it
  counts with was fitted to workloads like these.
- *~*: extrapolated: as much of the workload as the last column says was measured, and a quarter of
  it; the rest is a straight line.

What the others are: DrJAX and jit have all members on the device before the clock starts. Beam by
hand runs on FnApiRunner in one process, with server values as side inputs, or in a file if they are
large, and numbers of members as elements, which its DoFns look up in the files; BatchElements has
as many members as beamjax computes at once. Dask and Ray Data have two worker processes on this
machine without a dashboard, a few tasks for each worker that sum as many at a time, and JAX's
compilation cache; C is Dask's own arrays. FedJAX steps through each client's batches; it needs an
older JAX. H is written for the map-reduces with derivatives taken by hand, a function for each
direction.
"""


def write(path: Path, found: Mapping[str, Any], why: Mapping[str, str], gpu: Any = None) -> None:
    """Writes the page, and its plots to `images/` beside it, if matplotlib is there."""
    try:
        from benchmarks.suite import plots
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        images: dict[str, str] = {}
        print("no plots: matplotlib is not installed")
    else:
        images = plots.write(path.parent / "images", found)
    path.write_text("\n".join(_page(found, why, gpu, images)).rstrip() + "\n", "utf-8")


def _page(
    found: Mapping[str, Any], why: Mapping[str, str], gpu: Any, images: Mapping[str, str]
) -> Iterator[str]:
    yield HEAD
    if found["cases"]:
        yield from _cases(found, why, images)
    else:
        yield "Nothing was measured with this version yet.\n"
    yield from _scale(found["scale"], images)
    yield from _model(found["model"], images)
    yield "## On a GPU\n"
    yield from _gpu(gpu)


def _cases(
    found: Mapping[str, Any], why: Mapping[str, str], images: Mapping[str, str]
) -> Iterator[str]:
    told = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    yield f"Measured on: {told}; {found['seconds']:.0f} s in all, load average"
    yield f"{found['load average at the end']} at the end."
    if missing := sorted(set(CASES) - set(found["cases"])):
        yield f"Not measured by this version yet: {', '.join(missing)}."
    for name, versions in found["peers"].items():
        yield f"Python of {name}: " + ", ".join(f"{k} {v}" for k, v in versions.items()) + "."
    yield ""
    yield from _image(images, "time", "Seconds over those of the shard loop, by workload and way")
    yield "## The bar\n"
    yield from _bar(found, why)
    yield from _exact(found)
    yield "## Workloads\n"
    for case, measured in found["cases"].items():
        yield f"### {case}\n"
        yield f"{measured['title']}. {_facts(measured)}\n"
        yield from table(measured)


def _facts(measured: Mapping[str, Any]) -> str:
    plan = measured["plan"]
    text = f"{plan['nbytes'] / 1e6:,.0f} MB of members, {plan['shard_size']:,} in a shard, "
    if plan.get("at_once", plan["shard_size"]) != plan["shard_size"]:
        text += f"{plan['at_once']:,} of them at once, "
    text += f"{plan['partial_bytes']:,} bytes a partial"
    return text + "."


def table(measured: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a workload, as a table of Markdown."""
    yield "| way | seconds | x loop | first | peak | start | differs | |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for row in measured["rows"]:
        yield "| " + " | ".join(cells(row)) + " |"
    yield ""


def cells(row: Mapping[str, Any]) -> list[str]:
    """Of a way in a table. What was not measured has no number."""
    if row.get("seconds") is None:
        return [row["title"], *[""] * 6, row.get("missing") or f"failed: {row.get('error')}"]
    about = row.get("extrapolated")
    mark = "~" if about else ""
    ratio = "" if row.get("x_loop") is None else f"{mark}{row['x_loop']:.2f}"
    unit = "".join(name for name in about or {} if name != "seconds")
    note = f"from {about[unit]:,} {'members' if unit == 'n' else unit}" if about else ""
    if row.get("predicted") is not None:
        note = f"predicted {row['predicted']:.3f}"
    return [
        row["title"], f"{mark}{row['seconds']:.3f}", ratio, f"{mark}{row['first_seconds']:.2f}",
        f"{row['peak_mib']:.0f}", f"{row['start_mib']:.0f}", f"{row['difference']:.1e}", note,
    ]  # fmt: skip


def as_text(case: str, measured: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    head = ["way", "seconds", "x loop", "first", "peak", "start", "differs", ""]
    rows = [head, *(cells(row) for row in measured["rows"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [f"\n{case}: {measured['title']}\n{_facts(measured)}"]
    for row in rows:
        cols = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:7], widths[1:7], strict=True)),
        ]
        lines.append("  ".join([*cols, row[7]]).rstrip())
    return "\n".join(lines)


def _bar(found: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    if found["small"]:
        yield "**These are the sizes of a test: the numbers mean nothing.**\n"
    yield "| key | what is asked | found | | reason |"
    yield "| --- | --- | --- | --- | --- |"
    for line in found["bar"]:
        reason = "" if line["met"] else why.get(line["key"], "*not told yet*")
        mark = "met" if line["met"] else "**missed**"
        yield f"| {line['key']} | {line['ask']} | {line['found']} | {mark} | {reason} |"
    yield "\nHow many times the seconds of beamjax on DirectRunner the others took, long or not:\n"
    standings = list(bar.standings(found["cases"]))
    ways = [way for way in ALL if any(way == w for _, w, _ in standings)]
    yield "| | " + " | ".join(ALL[way].title for way in ways) + " |"
    yield "| --- |" + " ---: |" * len(ways)
    for case in found["cases"]:
        ratios = {way: ratio for c, way, ratio in standings if c == case}
        numbers = [f"{ratios[way]:.2f}" if way in ratios else "" for way in ways]
        yield f"| {case} | " + " | ".join(numbers) + " |"
    yield ""


def _exact(found: Mapping[str, Any]) -> Iterator[str]:
    told = bar.exact_over_plain(found["cases"])
    if not told:
        return
    yield "## What exact sums cost\n"
    yield "The rows with plain adds are the same program on the same runner with the option"
    yield '`reduction="fast"`: one float64 number for each sum, to which NumPy adds what each shard'
    yield "gives, so that the last bits depend on the order. Seconds of both, and their ratio:\n"
    yield "| | bytes a partial | local | plain adds | ratio | DirectRunner | plain adds | ratio |"
    yield "| --- |" + " ---: |" * 7
    for case, pairs in told.items():
        row = [case, f"{found['cases'][case]['plan']['partial_bytes']:,}"]
        for way in (LOCAL, DIRECT):
            exact, plain = pairs.get(way, (None, None))
            row += [_seconds(exact, False), _seconds(plain, False)]
            row.append(f"{exact / plain:.2f}" if exact and plain else "")
        yield "| " + " | ".join(row) + " |"
    yield ""


def _scale(scale: Mapping[str, Any], images: Mapping[str, str]) -> Iterator[str]:
    if "members" in scale:
        seconds = scale["members"]["seconds"]
        marks = {(way, str(n)) for way, n in scale["members"]["extrapolated"]}
        numbers = sorted({int(n) for found in seconds.values() for n in found})
        yield f"## Scale with the number of members\n\n{scale['members']['case']}, in seconds.\n"
        yield from _image(images, "members", "Seconds by number of members")
        yield "| way | " + " | ".join(f"{n:,}" for n in numbers) + " |"
        yield "| --- |" + " ---: |" * len(numbers)
        for way, found in seconds.items():
            told = {str(n): value for n, value in found.items()}
            row = [_seconds(told.get(str(n)), (way, str(n)) in marks) for n in numbers]
            yield f"| {ALL[way].title} | " + " | ".join(row) + " |"
        yield ""
    if "workers" in scale:
        yield "## One worker process and two\n"
        yield f"{scale['workers']['case']}. Processes of beamjax are started anew in each run,"
        yield "which is in its seconds; those of Dask and Ray are not.\n"
        yield from _image(images, "workers", "Seconds with one worker and with two")
        yield from table(scale["workers"])


def _seconds(value: float | None, about: bool) -> str:
    return "" if value is None else f"{'~' if about else ''}{value:.3f}"


def _model(paper: Mapping[str, Any], images: Mapping[str, str]) -> Iterator[str]:
    if not paper["cases"]:
        return
    _, _, text = (model.__doc__ or "").partition(": ")
    yield "## 1,000 workers, on paper\n"
    yield f"Nothing here was run on more than this machine. {text[0].upper()}{text[1:]}".rstrip()
    yield f"\nFor {paper['times_larger']:,} times the members that were measured:\n"
    yield from _image(images, "model", "Speed-up by number of workers, on paper")
    yield (
        "| | shards | passes | shard, ms | merge, ms | round, s | partial, MB | 1 worker, s "
        "| 100 times faster with | 1000 workers, s | speed-up |"
    )
    yield "| --- |" + " ---: |" * 10
    for case, told in paper["cases"].items():
        cost, totals = told["costs"], [sum(parts.values()) for parts in told["seconds"]]
        enough = (w for w, s in zip(told["workers"], told["speed_up"], strict=True) if s >= 100)
        yield (
            f"| {case} | {cost['shards'] * paper['times_larger']:,} | {cost['passes']} "
            f"| {1e3 * cost['shard']:.2f} | {1e3 * cost['merge']:.3f} | {cost['round']:.2f} "
            f"| {cost['partial'] / 1e6:,.3f} | {totals[0]:,.0f} | {next(enough, 'never')} "
            f"| {totals[-1]:,.1f} | {told['speed_up'][-1]:,.0f} |"
        )
    yield ""


def _gpu(gpu: Any) -> Iterator[str]:
    if gpu is None:
        yield "No GPU was at hand when this page was written, so nothing was measured there. The"
        yield "script is ready: `python -m benchmarks.suite.gpu --json gpu.json` runs A, B, C and"
        yield "F, and `--gpu gpu.json` puts its table here.\n"
        return
    yield f"{gpu['device']}, {gpu['bandwidth'] / 1e9:,.0f} GB/s of memory as measured by a copy.\n"
    yield "| | way | seconds | members/s | device busy | transfer | x jit | x bandwidth limit |"
    yield "| --- | --- |" + " ---: |" * 6
    for row in gpu["rows"]:
        yield (
            f"| {row['case']} | {row['title']} | {row['seconds']:.3f} | {row['rate']:,.0f} "
            f"| {_share(row['busy'])} | {_share(row['transfer'])} | {row['x_jit']:.2f} "
            f"| {row['x_limit']:.1f} |"
        )
    yield ""


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0%}"


def _image(images: Mapping[str, str], name: str, text: str) -> Iterator[str]:
    if name in images:
        yield f"![{text}](images/{images[name]})\n"
