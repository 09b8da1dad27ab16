"""How fast members are read from files: the same table in several formats, by shards.

    python benchmarks/sources.py --megabytes=500 --rounds=3

Writes the table to a temporary folder and reads it from there, in order, in shards of 4 MiB, each
format in turn, by one thread and by several. All bytes are looked at (their maximum is taken),
since a map alone reads nothing; the files are in the memory of the system, as just written ones
are.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

import beamjax as bj
from beamjax.sources.blocks import BLOCKS

WIDTH = 256
SHARD_BYTES = 4 << 20
GROUP_BYTES = 32 << 20
"""Of a row group and a record batch; a chunk of Zarr has as much as a shard."""


def table(x: np.ndarray, label: np.ndarray) -> pa.Table:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH)
    return pa.table({"x": lists, "label": label})


def write_all(folder: Path, x: np.ndarray, label: np.ndarray) -> dict[str, Callable[[], bj.Source]]:
    """Writes every format; gives what opens each."""
    rows, columns = GROUP_BYTES // (4 * WIDTH), table(x, label)
    np.save(folder / "x.npy", x)
    np.save(folder / "label.npy", label)
    np.savez(folder / "x.npz", x=x, label=label)
    feather.write_feather(columns, str(folder / "x.arrow"), "uncompressed", chunksize=rows)
    feather.write_feather(columns, str(folder / "lz4.arrow"), "lz4", chunksize=rows)
    pq.write_table(columns, folder / "x.parquet", row_group_size=rows)
    plain = {"compression": "none", "use_dictionary": False}
    pq.write_table(columns, folder / "plain.parquet", row_group_size=rows, **plain)
    ways: dict[str, Callable[[], bj.Source]] = {
        "from_npy": lambda: bj.from_npy({k: folder / f"{k}.npy" for k in ("x", "label")}),
        "from_npz": lambda: bj.from_npz(folder / "x.npz"),
        "from_arrow": lambda: bj.from_arrow(folder / "x.arrow"),
        "from_arrow, lz4": lambda: bj.from_arrow(folder / "lz4.arrow"),
        "from_parquet": lambda: bj.from_parquet(folder / "x.parquet"),
        "from_parquet, plain": lambda: bj.from_parquet(folder / "plain.parquet"),
    }
    try:
        import zarr
    except ImportError:
        print("from_zarr: not measured; pip install -e '.[zarr]'")
        return ways
    chunk = SHARD_BYTES // (4 * WIDTH)
    for name, packed in {"zarr": "auto", "plain.zarr": None}.items():
        group = zarr.open_group(folder / name, mode="w")
        for key, array in {"x": x, "label": label}.items():
            made = group.create_array(
                key, shape=array.shape, chunks=(chunk, *array.shape[1:]), dtype=array.dtype,
                compressors=packed,
            )  # fmt: skip
            made[...] = array
    ways["from_zarr"] = lambda: bj.from_zarr(folder / "zarr")
    ways["from_zarr, plain"] = lambda: bj.from_zarr(folder / "plain.zarr")
    return ways


def seconds(source: bj.Source, threads: int) -> float:
    """To read all shards, with nothing kept from before."""
    BLOCKS.clear()
    step = max(SHARD_BYTES // (4 * WIDTH), 1)

    def read(start: int) -> None:
        for array in source.read(start, min(start + step, len(source))):
            array.max()

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, len(source), step)))
    return time.perf_counter() - begin


def size(folder: Path, way: str) -> int:
    """Bytes on the disk."""
    files = {
        "from_npy": ["x.npy", "label.npy"], "from_npz": ["x.npz"], "from_arrow": ["x.arrow"],
        "from_arrow, lz4": ["lz4.arrow"], "from_parquet": ["x.parquet"],
        "from_parquet, plain": ["plain.parquet"], "from_zarr": ["zarr"],
        "from_zarr, plain": ["plain.zarr"],
    }  # fmt: skip
    found = (path for name in files[way] for path in [folder / name, *(folder / name).rglob("*")])
    return sum(path.stat().st_size for path in found if path.is_file())


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    flags = parser.parse_args()
    names = ("numpy", "pyarrow", "zarr")
    versions = ", ".join(f"{name} {installed(name)}" for name in names)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}"
    print(f"{machine}, {versions}")
    rows = flags.megabytes * 10**6 // (4 * WIDTH + 8)
    x = np.random.default_rng(0).integers(0, 256, (rows, WIDTH)).astype(np.float32) / 255
    with tempfile.TemporaryDirectory() as folder:
        ways = write_all(Path(folder), x, np.arange(rows))
        sizes = {way: size(Path(folder), way) for way in ways}
        del x
        print(f"{rows} members of float32[{WIDTH}] and int64[], {flags.megabytes} MB\n")
        counts = (1, flags.threads)
        times: dict[tuple[str, int], list[float]] = {(w, c): [] for w in ways for c in counts}
        for _ in range(flags.rounds):
            for way, count in times:
                times[way, count].append(seconds(ways[way](), count))
    middle = {key: statistics.median(found) for key, found in times.items()}
    print(f"{'':20} {'on disk':>8} " + "".join(f"{f'{c} threads':>26}" for c in counts))
    for way in ways:
        line = f"{way:20} {sizes[way] / 1e6:5.0f} MB "
        for count in counts:
            ratio = middle[way, count] / middle["from_npy", count]
            line += f"{rows / middle[way, count]:12.0f} /s {ratio:7.2f} x t"
        print(line)
    print("\n/s: members a second, x t: times the seconds of from_npy")
    print(f"load average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
