"""Embeddings of a corpus, computed on workers, and their principal components.

The documents are passages of 4 KiB of Python's own help texts, cut at random places until there are
as many gigabytes as requested, in Parquet files. The first program only maps: it counts the pairs
of letters of a document, scales and projects the counts, and the workers write the results to
files. The second program reads these files, reduces them to a mean and a covariance in two passes,
and finds the axes. The third program projects the embeddings on the axes, again into files.

    python examples/corpus_pca.py --gigabytes=0.1 --runner=DirectRunner

Other flags go to beamjax (--shard_size=64) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import beamjax as bj

LETTERS, PAIRS, WIDTH, AXES = 4096, 1024, 64, 3

Rows = dict[str, jax.Array]


@bj.program(placements={"documents": None})
def embed(projection: jax.Array, documents: Rows) -> jax.Array:
    """The embeddings (n, WIDTH) of documents."""

    def vector(document: Rows) -> jax.Array:
        letters = document["text"].astype(jnp.int32)
        pairs = (letters[:-1] * 31 + letters[1:]) % PAIRS
        counts = jnp.log1p(jnp.zeros(PAIRS).at[pairs].add(1))
        return (counts / jnp.linalg.norm(counts)) @ projection

    return bj.map_fn(vector, documents)


@bj.program(placements={"documents": None})
def components(vectors: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean, the variances along the axes in descending order, and the axes (WIDTH, AXES)."""
    mean = bj.reduce_mean(vectors)
    squares = bj.map_fn(lambda x, m: jnp.outer(x - m, x - m), (vectors, bj.broadcast(mean)))
    variances, axes = jnp.linalg.eigh(bj.reduce_mean(squares))
    return mean, variances[::-1], axes[:, ::-1][:, :AXES]


@bj.program(placements={"documents": None})
def project(mean: jax.Array, axes: jax.Array, vectors: jax.Array) -> jax.Array:
    """The coordinates of the documents along the axes, (n, AXES)."""
    return bj.map_fn(lambda x: (x - mean) @ axes, vectors)


def write_corpus(folder: Path, n: int, rng: np.random.Generator) -> None:
    """Writes n documents to Parquet files, in row groups of 32 MiB."""
    text = np.frombuffer("".join(topics.values()).encode(), np.uint8)
    passages = np.lib.stride_tricks.sliding_window_view(text, LETTERS)
    kind = pa.schema({"text": pa.binary(LETTERS)})
    for number, start in enumerate(range(0, n, 1 << 17)):
        left = min(n - start, 1 << 17)
        with pq.ParquetWriter(folder / f"part-{number:04}.parquet", kind) as writer:
            while left > 0:
                size = min(left, 1 << 13)
                chosen = pa.py_buffer(passages[rng.integers(len(passages), size=size)])
                rows = pa.Array.from_buffers(kind.field("text").type, size, [None, chosen])
                writer.write_table(pa.table([rows], schema=kind))
                left -= size


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.1f} s")


def main(argv: Sequence[str] | None = None) -> np.ndarray:
    """Returns the shares of the variance along all axes; removes the files that it wrote."""
    parser = argparse.ArgumentParser(description="Embedding and PCA.", allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=0.1)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    flags, others = parser.parse_known_args(argv)
    n = int(flags.gigabytes * 1e9 / LETTERS)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        with timed(f"{n:,} documents of {LETTERS} letters written"):
            write_corpus(Path(folder), n, np.random.default_rng(0))

        def run(fn: Callable[..., Any], *args: Any) -> Any:
            options = [*others, f"--results_folder={folder}/{fn.__name__}"]
            return bj.run(fn, *args, runner=flags.runner, options=options, keep="placed")

        projection = jax.random.normal(jax.random.key(0), (PAIRS, WIDTH))
        with timed(f"embedded on {flags.runner}"):
            vectors = run(embed, projection, bj.from_parquet(folder))
        with timed("mean and covariance"):
            mean, variances, axes = run(components, vectors)
        with timed("projected"):
            projected = run(project, mean, axes, vectors)
        shares = np.asarray(variances) / np.sum(variances)
        print("share of the variance:", ", ".join(f"{share:.1%}" for share in shares[:AXES]))
        spread = np.var(projected[:100_000], axis=0) / np.sum(variances)
        print("of documents projected:", ", ".join(f"{share:.1%}" for share in spread))
    return shares


if __name__ == "__main__":
    main()
