"""The page of results: tables and plots from what was measured, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite import bar, model
from benchmarks.suite.cases import CASES
from benchmarks.suite.ways import ALL, DIRECT, LOCAL, LOOP, SESSION

HEAD = """\
# Benchmark suite

This page compares beamjax with a plain loop, `jax.jit`, hand-written Beam, Dask, Ray Data, DuckDB,
DrJAX and FedJAX on one machine. `python -m benchmarks.suite` measures them and writes the page. The
[last section](#how-it-is-measured) explains the columns.
"""

METHOD = """\
## How it is measured

Each way of a workload has a process of its own, or a cluster of processes on this machine. The
ways take turns, so a busy machine slows all of them down alike. Seconds are the median of the
rounds after the first call; imports, the start of clusters, compilation and warm-up are not
included. All ways read the same files, which are in the page cache. Their results are compared with
that of the first way.

- *x loop*: seconds divided by those of the shard loop, the ideal: a jitted function that is called
  for shard after shard in one process and summed in float64. Its shards have as many members as
  beamjax computes at once.
- *first*: seconds of the first call, with tracing and compilation.
- *peak* and *start*: MiB of the process and its children, without mapped files: the most in all
  rounds, and before the first call.
- *differs*: the largest difference of a leaf from the result of the first way, divided by the
  largest number of the leaf.
- *~*: extrapolated linearly, from the part of the workload in the last column and a quarter of it.

The other tools:

- **DrJAX and jit** have all members on the device before the clock starts.
- **Hand-written Beam** runs on FnApiRunner in one process, with server values as side inputs, or in
  a file if they are large. Its elements are indices of members, which its DoFns read from the
  files. The batches of BatchElements have as many members as beamjax computes at once.
- **Dask and Ray Data** have two worker processes on this machine without a dashboard, a few tasks
  for each worker that sum as many members at a time, and JAX's compilation cache. C is Dask's own
  arrays.
- **FedJAX** steps through each client's batches. It needs an older JAX.
- **H** needs a gradient. Beam, Dask and Ray Data, which have none, get hand-written derivatives.
- **N** is no sum over members. Each tool computes it in its own way: DuckDB and Dask by a
  group-by, Ray Data by a function of each group, `jit` by a sort, and the shard loop by NumPy with
  all rows in memory. beamjax counts digits, in passes over shards.
- **P** may take 2 GiB of memory in beamjax (`memory="2GiB"`); 10^8 rows are 3.6 GB. The shard loop,
  Dask and Ray Data sum the gradient and the Hessian of row groups. Dask-ML is its estimator with
  the solver `newton`, on arrays of a Dask data frame.
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
        yield from _results(found, why, images)
    else:
        yield "Nothing was measured with this version yet.\n"
    yield from _scale(found["scale"], images)
    yield from _model(found["model"], images)
    yield "## On a GPU\n"
    yield from _gpu(gpu)
    yield METHOD
    yield from _machine(found)


def _results(
    found: Mapping[str, Any], why: Mapping[str, str], images: Mapping[str, str]
) -> Iterator[str]:
    if found["small"]:
        yield "**These are the sizes of a test: the numbers mean nothing.**\n"
    yield from _image(images, "time", "Seconds over those of the shard loop, by workload and way")
    yield from _summary(found)
    yield from _standings(found, why)
    yield from _exact(found)
    yield from _bar(found, why)
    yield "## Workloads\n"
    for case, measured in found["cases"].items():
        yield f"### {case}\n"
        yield f"{measured['title']}. {_facts(measured)}\n"
        yield from table(measured)


def _summary(found: Mapping[str, Any]) -> Iterator[str]:
    """Seconds of beamjax and of the shard loop."""
    yield "Times of beamjax as multiples of that of the shard loop; below 1, beamjax is faster.\n"
    yield "| | shard loop | `local` | DirectRunner | session |"
    yield "| --- |" + " ---: |" * 4
    for case, measured in found["cases"].items():
        rows = {row["way"]: row for row in measured["rows"]}
        loop = rows.get(LOOP, {}).get("seconds")
        ratios = (rows.get(way, {}).get("x_loop") for way in (LOCAL, DIRECT, SESSION))
        cells = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        title = measured["title"].partition(":")[0].partition(", then")[0]
        time = "" if loop is None else f"{loop:.3f}&nbsp;s"
        yield f"| {case}: {title} | {time} | {' | '.join(cells)} |"
    yield ""


def _machine(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["cases"]:
        return
    facts = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    yield f"Measured on: {facts}; {found['seconds']:.0f} s in all, load average"
    yield f"{found['load average at the end']} at the end."
    if missing := sorted(set(CASES) - set(found["cases"])):
        yield f"Not measured by this version yet: {', '.join(missing)}."
    for name, versions in found["peers"].items():
        yield f"Python of {name}: " + ", ".join(f"{k} {v}" for k, v in versions.items()) + "."


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
    missed = [line for line in found["bar"] if not line["met"]]
    yield "## Targets\n"
    met = f"{len(found['bar']) - len(missed)} of {len(found['bar'])} targets are met."
    yield f"{met} These are missed:\n" if missed else f"{met}\n"
    for line in missed:
        reason = why.get(line["key"], "The reason is not known yet")
        reason = f"{reason[0].upper()}{reason[1:]}"
        yield f"- **{line['key']}**: {line['ask']}. Found {line['found']}. {reason}."
    yield ""


def targets(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the table of targets."""
    yield "# Targets of the suite\n"
    yield "`python -m benchmarks.suite --targets` writes this table; the page has what is missed.\n"
    yield "| | target | found |"
    yield "| --- | --- | --- |"
    for line in found["bar"]:
        mark = "" if line["met"] else ", **missed**"
        yield f"| {line['key']} | {line['ask']} | {line['found']}{mark} |"


def _standings(found: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    """How long the others take, in multiples of beamjax in a session on DirectRunner."""
    yield "## Other tools\n"
    yield "Times as multiples of that of a call in a session on DirectRunner; below 1, the tool is"
    yield "faster. A session keeps its workers between calls, as Dask and Ray do.\n"
    standings = list(bar.standings(found["cases"]))
    ways = [way for way in ALL if any(way == w for _, w, _ in standings)]
    yield "| | " + " | ".join(found["cases"]) + " |"
    yield "| --- |" + " ---: |" * len(found["cases"])
    for way in ways:
        ratios = {case: ratio for case, w, ratio in standings if w == way}
        numbers = [_ratio(ratios.get(case)) for case in found["cases"]]
        yield f"| {ALL[way].title} | " + " | ".join(numbers) + " |"
    yield ""
    for reason, keys in _by_reason(bar.behind(found["cases"]), why).items():
        yield f"- {', '.join(keys)}: {reason}."
    yield ""


def _by_reason(behind: list[tuple[str, float]], why: Mapping[str, str]) -> Mapping[str, list[str]]:
    """The cases and names of faster tools, by the reason."""
    found: dict[str, list[str]] = {}
    for key, _ in behind:
        case, _, way = key.split(" ")
        reason = why.get(key, "the reason is not known yet")
        found.setdefault(reason, []).append(f"{case}, {ALL[way].title}")
    return found


def _exact(found: Mapping[str, Any]) -> Iterator[str]:
    pairs_of = bar.exact_over_plain(found["cases"])
    if not pairs_of:
        return
    yield "## Cost of exact sums\n"
    yield "The columns *plain adds* have the same program on the same runner with the option"
    yield '`reduction="fast"`: NumPy adds the results of the shards in float64, so the last bits'
    yield "depend on the order. The table has the seconds of both, and their ratio:\n"
    yield "| | bytes a partial | local | plain adds | ratio | DirectRunner | plain adds | ratio |"
    yield "| --- |" + " ---: |" * 7
    for case, pairs in pairs_of.items():
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
            by_number = {str(n): value for n, value in found.items()}
            row = [_seconds(by_number.get(str(n)), (way, str(n)) in marks) for n in numbers]
            yield f"| {ALL[way].title} | " + " | ".join(row) + " |"
        yield ""
    if "workers" in scale:
        yield "## One and two worker processes\n"
        yield f"{scale['workers']['case']}. Processes of beamjax are started anew in each run,"
        yield "which is in its seconds; those of Dask and Ray are not.\n"
        yield from _image(images, "workers", "Seconds with one worker and with two")
        yield from table(scale["workers"])


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.01 else "< 0.01"


def _seconds(value: float | None, about: bool) -> str:
    return "" if value is None else f"{'~' if about else ''}{value:.3f}"


def _model(paper: Mapping[str, Any], images: Mapping[str, str]) -> Iterator[str]:
    if not paper["cases"]:
        return
    _, _, text = (model.__doc__ or "").partition(": ")
    yield "## 1,000 workers, calculated\n"
    yield f"None of this was run on more than one machine. {text[0].upper()}{text[1:]}".rstrip()
    yield f"\nFor {paper['times_larger']:,} times the members that were measured:\n"
    yield from _image(images, "model", "Speed-up by number of workers, calculated")
    yield (
        "| | shards | passes | shard, ms | merge, ms | round, s | partial, MB | 1 worker, s "
        "| 100 times faster with | 1000 workers, s | speed-up |"
    )
    yield "| --- |" + " ---: |" * 10
    for case, modelled in paper["cases"].items():
        cost = modelled["costs"]
        totals = [sum(parts.values()) for parts in modelled["seconds"]]
        enough = (
            w for w, s in zip(modelled["workers"], modelled["speed_up"], strict=True) if s >= 100
        )
        yield (
            f"| {case} | {cost['shards'] * paper['times_larger']:,} | {cost['passes']} "
            f"| {1e3 * cost['shard']:.2f} | {1e3 * cost['merge']:.3f} | {cost['round']:.2f} "
            f"| {cost['partial'] / 1e6:,.3f} | {totals[0]:,.0f} | {next(enough, 'never')} "
            f"| {totals[-1]:,.1f} | {modelled['speed_up'][-1]:,.0f} |"
        )
    yield ""


def _gpu(gpu: Any) -> Iterator[str]:
    if gpu is None:
        yield "Not run yet: `python -m benchmarks.suite.gpu --json gpu.json` runs A, B and F, and"
        yield "`--gpu gpu.json` puts its table here.\n"
        return
    yield (
        f"Measured {gpu['date']} with JAX {gpu['jax']} on one {gpu['device']}, whose memory copies "
        f"{gpu['bandwidth'] / 1e12:.1f} TB/s.\nThe first way has its data on the device before the "
        "clock starts; the others read files.\n*x limit* is seconds over the time that reading all "
        "members once at that bandwidth takes.\n*Same bits*: of all calls of the way.\n"
    )
    yield (
        "| | way | first call, s | seconds | members/s | x jit | x limit | device busy "
        "| transfer | peak MiB | same bits |"
    )
    yield "| --- | --- |" + " ---: |" * 9
    for row in gpu["rows"]:
        yield (
            f"| {row['case']} | {row['title']} | {row['first']:.1f} | {row['seconds']:.4f} "
            f"| {row['rate']:,.0f} | {row['x_jit']:.1f} | {row['x_limit']:,.0f} "
            f"| {_share(row['busy'])} | {_share(row['transfer'])} "
            f"| {(row['peak'] or 0) / 2**20:,.0f} | {'yes' if row['same_bits'] else 'no'} |"
        )
    yield ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _image(images: Mapping[str, str], name: str, text: str) -> Iterator[str]:
    if name in images:
        yield f"![{text}](images/{images[name]})\n"
