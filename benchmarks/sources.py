"""How fast members are read from files: the same table in several formats, by shards.

    python benchmarks/sources.py --megabytes=500 --rounds=5
    python benchmarks/sources.py --against=../base --limit=1.2

Writes the table to a temporary folder and reads it from there, in order, in shards of 4 MiB, each
format in turn, by one thread and by several; "by index" reads one member in a hundred. All bytes
are looked at (their maximum is taken), since a map alone reads nothing; the files are in the memory
of the system, as just written ones are.

`--against` names another checkout, which reads the same files, with its `.venv`. Both read a format
directly one after the other, and take turns in who is first, so that the load of the machine is the
same for both. A source counts as slower if three ratios are all above `--limit`: the median of
those of the rounds, that of the best times, and that of the best times of the processor, which
other processes do not change; the command then exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq

import beamjax as bj

WIDTH = 256
SHARD_BYTES = 4 << 20
GROUP_BYTES = 32 << 20
"""Of a row group and a record batch; a chunk of Zarr has as much as a shard."""
SLOW = 8
"""Texts and records are parsed, which takes long, so their files have a part of the members."""

LEAST_SECONDS = 0.3
"""How long a format is read in a round, repeatedly if need be; the best time counts."""

Seconds = tuple[float, float]
"""Of the clock, and of the processor."""
Timer = Callable[[str, int], Seconds]
"""Reads a format by a number of threads."""


def table(x: np.ndarray, label: np.ndarray) -> pa.Table:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH)
    return pa.table({"x": lists, "label": label})


def write_all(folder: Path, x: np.ndarray, label: np.ndarray) -> None:
    rows, columns = GROUP_BYTES // (4 * WIDTH), table(x, label)
    np.save(folder / "x.npy", x)
    np.save(folder / "label.npy", label)
    np.savez(folder / "x.npz", x=x, label=label)
    feather.write_feather(columns, str(folder / "x.arrow"), "uncompressed", chunksize=rows)
    feather.write_feather(columns, str(folder / "lz4.arrow"), "lz4", chunksize=rows)
    pq.write_table(columns, folder / "x.parquet", row_group_size=rows)
    plain = {"compression": "none", "use_dictionary": False}
    pq.write_table(columns, folder / "plain.parquet", row_group_size=rows, **plain)
    some = x[: len(x) // SLOW]
    csv.write_csv(pa.table({f"c{i}": some[:, i] for i in range(16)}), folder / "x.csv")
    write_records(folder / "x.tfrecord", some)
    with contextlib.suppress(ImportError):
        write_zarr(folder, x, label)


def write_zarr(folder: Path, x: np.ndarray, label: np.ndarray) -> None:
    import zarr

    chunk = SHARD_BYTES // (4 * WIDTH)
    for name, packed in {"zarr": "auto", "plain.zarr": None}.items():
        group = zarr.open_group(folder / name, mode="w")
        for key, array in {"x": x, "label": label}.items():
            stored = group.create_array(
                key, shape=array.shape, chunks=(chunk, *array.shape[1:]), dtype=array.dtype,
                compressors=packed,
            )  # fmt: skip
            stored[...] = array


def write_records(path: Path, x: np.ndarray) -> None:
    """Records of `tf.train.Example`, the bytes of which are the same but for the numbers."""
    from beamjax.sources.records.tfrecord_frames import masked_checksums

    def field(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 127 | 128])
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    with path.open("wb") as file:
        for row in x:
            floats = field(2, field(1, row.tobytes()))
            record = field(1, field(1, field(1, b"x") + field(2, floats)))
            length = struct.pack("<Q", len(record))
            sums = masked_checksums([length, record]).astype("<u4").tobytes()
            file.write(length + sums[:4] + record + sums[4:])


def ways(folder: Path) -> dict[str, Callable[[], bj.Source]]:
    """What opens each format, by the name of its line."""
    found: dict[str, Callable[[], bj.Source]] = {
        "from_npy": lambda: bj.from_npy({k: folder / f"{k}.npy" for k in ("x", "label")}),
        "from_npz": lambda: bj.from_npz(folder / "x.npz"),
        "from_arrow": lambda: bj.from_arrow(folder / "x.arrow"),
        "from_arrow, lz4": lambda: bj.from_arrow(folder / "lz4.arrow"),
        "from_parquet": lambda: bj.from_parquet(folder / "x.parquet"),
        "from_parquet, plain": lambda: bj.from_parquet(folder / "plain.parquet"),
        "from_csv": lambda: bj.from_csv(folder / "x.csv"),
        "from_tfrecord": lambda: bj.from_tfrecord(folder / "x.tfrecord"),
        "npy by index": lambda: _some(bj.from_npy({"x": folder / "x.npy"})),
        "arrow by index": lambda: _some(bj.from_arrow(folder / "x.arrow")),
        "parquet by index": lambda: _some(bj.from_parquet(folder / "x.parquet")),
    }
    if (folder / "zarr").exists():
        found["from_zarr"] = lambda: bj.from_zarr(folder / "zarr")
        found["from_zarr, plain"] = lambda: bj.from_zarr(folder / "plain.zarr")
    return found


def _some(source: bj.Source) -> bj.Source:
    return bj.take(source, np.arange(0, len(source), 100))


def _cache() -> Any:
    """The cache of decoded blocks, which other versions have in another module."""
    for name in ("storage.shared_cache", "sources.blocks", "sources.block_source"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(f"beamjax.{name}").BLOCKS
    raise SystemExit("found no cache of decoded blocks in this version of beamjax")


def seconds(source: bj.Source, threads: int) -> Seconds:
    """To read all shards, with an empty cache: the time, and the time of the processor."""
    step = max(SHARD_BYTES // (4 * WIDTH), 1)

    def read(start: int) -> None:
        for array in source.read(start, min(start + step, len(source))):
            array.max()

    found = []
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        while not found or time.perf_counter() - begun < LEAST_SECONDS:
            _cache().clear()
            begin, used = time.perf_counter(), time.process_time()
            list(pool.map(read, range(0, len(source), step)))
            found.append((time.perf_counter() - begin, time.process_time() - used))
    return min(wall for wall, _ in found), min(used for _, used in found)


def serve(folder: Path) -> None:
    """Reads "number of the format, number of threads" from lines, and answers with seconds."""
    opened = list(ways(folder).values())
    for line in sys.stdin:
        way, count = map(int, line.split())
        try:
            source = opened[way]()
        except AttributeError:  # This version does not have the format.
            print(math.nan, math.nan, flush=True)
        else:
            print(*seconds(source, count), flush=True)


@contextlib.contextmanager
def reader(checkout: Path, folder: Path) -> Iterator[Timer]:
    """A process that reads with the beamjax of a checkout."""
    python = checkout / ".venv" / "bin" / "python"
    # `absolute`, since a link to Python outside of the environment would not have its packages.
    command = [str(python.absolute()) if python.exists() else sys.executable, __file__]
    names = list(ways(folder))
    environment = {**os.environ, "PYTHONPATH": str(checkout.absolute())}
    with subprocess.Popen(
        [*command, f"--serve={folder}"], text=True, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip

        def timed(way: str, count: int) -> Seconds:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{names.index(way)} {count}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"{checkout}: can't read {way}")
            wall, used = map(float, answer.split())
            return wall, used

        yield timed


def size(folder: Path, way: str) -> int:
    """Bytes on the disk."""
    files = {
        "from_npy": ["x.npy", "label.npy"], "from_npz": ["x.npz"], "from_arrow": ["x.arrow"],
        "from_arrow, lz4": ["lz4.arrow"], "from_parquet": ["x.parquet"],
        "from_parquet, plain": ["plain.parquet"], "from_csv": ["x.csv"],
        "from_tfrecord": ["x.tfrecord"], "npy by index": ["x.npy"], "arrow by index": ["x.arrow"],
        "parquet by index": ["x.parquet"], "from_zarr": ["zarr"],
        "from_zarr, plain": ["plain.zarr"],
    }  # fmt: skip
    found = (path for name in files[way] for path in [folder / name, *(folder / name).rglob("*")])
    return sum(path.stat().st_size for path in found if path.is_file())


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


Times = dict[tuple[str, int], list[Seconds]]
"""The seconds of each round, by the format and the number of threads."""


def measured(names: list[str], counts: list[int], rounds: int, timers: list[Timer]) -> list[Times]:
    """The times of each timer; they take turns."""
    found: list[Times] = [{(w, c): [] for w in names for c in counts} for _ in timers]
    for number in range(rounds):
        for way, count in found[0]:
            pairs = list(zip(timers, found, strict=True))
            for timer, times in reversed(pairs) if number % 2 else pairs:
                times[way, count].append(timer(way, count))
    return found


def print_speeds(folder: Path, times: Times, counts: list[int], rows: int) -> None:
    middle = {key: statistics.median(wall for wall, _ in found) for key, found in times.items()}
    print(f"{'':20} {'on disk':>8} " + "".join(f"{f'{c} threads':>26}" for c in counts))
    for way in dict.fromkeys(way for way, _ in times):
        line, members = f"{way:20} {size(folder, way) / 1e6:5.0f} MB ", rows
        if way in ("from_csv", "from_tfrecord"):
            members //= SLOW
        elif "by index" in way:
            members //= 100
        for count in counts:
            ratio = middle[way, count] / middle["from_npy", count]
            line += f"{members / middle[way, count]:12.0f} /s {ratio:7.2f} x t"
        print(line)
    print("\n/s: members a second, x t: times the seconds of from_npy")


def print_ratios(here: Times, there: Times, limit: float) -> list[str]:
    """Prints the times of this checkout divided by those of the other; returns the slower ones."""
    print(f"\n{'here / there':32} {'median':>8} {'best':>8} {'processor':>10}")
    slower = []
    for (way, count), times in here.items():
        others = there[way, count]
        if math.isnan(others[0][0]):
            continue
        middle = statistics.median(a / b for (a, _), (b, _) in zip(times, others, strict=True))
        (wall, used), (wall_there, used_there) = (
            map(min, zip(*x, strict=True)) for x in (times, others)
        )
        ratios = middle, wall / wall_there, used / used_there
        name = f"{way}, {count} threads"
        slow = min(ratios) > limit
        print(f"{name:32} {ratios[0]:8.2f} {ratios[1]:8.2f} {ratios[2]:10.2f}{' slower' * slow}")
        slower += [name] if slow else []
    return slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve is not None:
        serve(flags.serve)
        return
    versions = ", ".join(f"{name} {installed(name)}" for name in ("numpy", "pyarrow", "zarr"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}"
    print(f"{machine}, {versions}")
    rows = flags.megabytes * 10**6 // (4 * WIDTH + 8)
    x = np.random.default_rng(0).integers(0, 256, (rows, WIDTH)).astype(np.float32) / 255
    checkouts = [Path(__file__).resolve().parent.parent, *filter(None, [flags.against])]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder, counts = Path(temporary), [1, flags.threads]
        write_all(folder, x, np.arange(rows))
        del x
        print(f"{rows} members of float32[{WIDTH}] and int64[], {flags.megabytes} MB\n")
        timers = [stack.enter_context(reader(each, folder)) for each in checkouts]
        here, *others = measured(list(ways(folder)), counts, flags.rounds, timers)
        print_speeds(folder, here, counts, rows)
    slower = [name for there in others for name in print_ratios(here, there, flags.limit)]
    print(f"load average at the end {os.getloadavg()[0]:.1f}")
    if slower:
        raise SystemExit(f"slower than {flags.limit} x: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
