"""The examples and the README: what they print is what they say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNNERS = ("local", "DirectRunner")


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(printed):
    """The accuracy after each round, in percent."""
    found = re.findall(r"^round +(\d+) .* accuracy .* ([\d.]+)%$", printed, re.M)
    return {int(number): float(accuracy) for number, accuracy in found}


def code_block(language, containing=""):
    """The first block of the README in this language that holds this text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    return next(block for block in blocks if containing in block)


# --- in the gate


def test_the_readme_example_prints_what_the_readme_says(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code_block("python"), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == code_block("text", "step 0")


def test_examples_are_short_and_say_how_they_are_called():
    shown = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    paths = sorted((ROOT / "examples").glob("*.py"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 120
        assert f"    python examples/{path.name} " in text
        assert "--runner" in text
        assert f"{{literalinclude}} ../examples/{path.name}" in shown
        picture = f"images/examples/{path.stem}.svg"  # of docs/gallery.py
        assert picture in shown
        assert (ROOT / "docs" / picture).is_file()


@pytest.mark.parametrize("runner", RUNNERS)
def test_private_statistics_drops_the_damaged_records_and_comes_near(runner, capsys):
    private, true = example("private_statistics").main([f"--runner={runner}"])
    assert private == pytest.approx(true, rel=0.1)
    printed = capsys.readouterr().out
    assert "dropped: patients 7, 100, 101;" in printed
    assert "true: 439" in printed


@pytest.mark.parametrize("runner", RUNNERS)
def test_corpus_pca_finds_the_axes_of_numpy(runner, tmp_path):
    corpus = example("corpus_pca")
    np, bj = corpus.np, corpus.bj
    corpus.write_corpus(tmp_path, 100, np.random.default_rng(1))
    documents = bj.from_parquet(tmp_path)
    projection = np.random.default_rng(2).normal(size=(corpus.PAIRS, corpus.WIDTH))
    vectors = bj.run(corpus.embed, projection.astype("float32"), documents, runner=runner)

    letters = documents.read(0, 100)[0].astype(int)
    pairs = (letters[:, :-1] * 31 + letters[:, 1:]) % corpus.PAIRS
    counts = np.log1p([np.bincount(row, minlength=corpus.PAIRS) for row in pairs])
    expected = counts / np.linalg.norm(counts, axis=1, keepdims=True) @ projection
    np.testing.assert_allclose(vectors, expected, atol=1e-5)

    mean, variances, axes = bj.run(corpus.components, np.asarray(vectors), runner=runner)
    covariance = np.cov(expected.T, bias=True)
    np.testing.assert_allclose(mean, expected.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(variances, np.linalg.eigvalsh(covariance)[::-1], atol=1e-5)
    np.testing.assert_allclose(axes.T @ covariance @ axes, np.diag(variances[:3]), atol=1e-5)


# --- nightly


@pytest.mark.long
@pytest.mark.parametrize("runner", RUNNERS)
def test_federated_digits_learns(runner, capsys):
    shown = accuracies(code_block("text", "round  1"))
    rounds = max(shown)
    final = example("federated_digits").main([f"--rounds={rounds}", f"--runner={runner}"])
    printed = capsys.readouterr().out
    found = accuracies(printed)
    assert {number: found[number] for number in shown} == pytest.approx(shown, abs=1.0)
    assert list(found.values()) == sorted(found.values())
    assert found[rounds] > 80
    assert f"{final:.1%}" == f"{found[rounds]}%"
    assert f"federated_round on {runner} against jit: 9 leaves" in printed
    assert "all within the tolerance" in printed


@pytest.mark.long
@pytest.mark.parametrize("slopes", [False, True])
def test_monte_carlo_comes_near_the_formula_with_the_same_bits_everywhere(slopes):
    monte_carlo = example("monte_carlo")
    flags = ["--paths=200_000", *["--slopes"] * slopes]
    found, beam = (monte_carlo.main([*flags, f"--runner={runner}"]) for runner in RUNNERS)
    assert found == beam
    estimate, expected = found["price"]
    assert abs(estimate - expected) < 4 * 9.04 / 200_000**0.5
    for name in monte_carlo.MARKET if slopes else ():
        estimate, expected = found[f"slope in {name}"]
        assert estimate == pytest.approx(expected, rel=0.03)


def near(relative, absolute=0.0):
    """Whether the first of two answers is near the second."""
    return lambda found: found[0] == pytest.approx(found[1], rel=relative, abs=absolute)


AIMS = {
    "cohorts_by_index": (["--rounds=12"], lambda cosine: cosine > 0.98),
    "kmeans_digits": (["--restarts=2"], near(1e-3)),
    "clustered_clients": (["--rounds=4"], lambda share: share == 1),
    "self_tuning_rate": (["--steps=3"], lambda them: them == sorted(them, reverse=True)),
    "budgeted_clients": (
        ["--rounds=3"],
        lambda them: (
            them["gain per cost"][0] > them["at random"][0] and them["gain per cost"][-1] > 0.85
        ),
    ),
    "influence": (["--top=3"], near(0.35)),
    "resampling": (
        ["--replicates=100"],
        lambda them: (
            them["bootstrap"] == pytest.approx(them["jackknife"], rel=0.3)
            and min(them["folds"]) > 0.85
        ),
    ),
    "text_embeddings": ([], lambda share: share > 0.3),
    "federated_table": (
        ["--rows=20_000", "--clients=500", "--cohort=200", "--rounds=3"],
        lambda accuracy: accuracy > 0.97,
    ),
    "forgotten_patients": ([], lambda them: them == (75, 12, True)),
    "own_pipeline": (
        ["--rounds=2000"],
        lambda them: near(0, 1e-4)(them[::2]) and near(0, 1e-2)(them[1:]),
    ),
    # LogisticRegression(C=1, fit_intercept=False), on each of the 569 sets without one patient.
    "four_devices": (
        [],
        lambda them: them[2] and them[::3] == pytest.approx([0.0751385] * 2, abs=4e-5),
    ),
}
"""Of examples: their flags, and what holds of what they return."""

WITHOUT_RUNNER = ("text_embeddings", "own_pipeline", "four_devices")
LONG_ON_BEAM = ("budgeted_clients", "influence", *WITHOUT_RUNNER)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "runner"),
    [(name, r) for name in AIMS for r in RUNNERS if r == "local" or name not in LONG_ON_BEAM],
)
def test_examples_come_near_their_aim(name, runner):
    flags, reached = AIMS[name]
    runners = [] if name in WITHOUT_RUNNER else [f"--runner={runner}"]
    found = example(name).main([*flags, *runners])
    assert reached(found), found


@pytest.mark.long
def test_training_of_networks_has_the_same_bits_everywhere(capsys):
    diloco, cnn = example("diloco_text"), example("cnn_clients")
    allow = cnn.jax.numpy_rank_promotion("allow")  # optax and stax need these two
    with cnn.jax.numpy_dtype_promotion("standard"), allow:
        losses = diloco.main(["--rounds=2", "--runner=local"])
        assert 3 < losses[1] < losses[0] < 7
        assert diloco.main(["--rounds=2"]) == losses
        capsys.readouterr()
        flags = ["--rounds=3", "--clients=20"]
        found = [cnn.main([*flags, f"--runner={runner}"]) for runner in RUNNERS]
    assert found[0] == found[1]
    assert found[0][-1] > 0.25
    losses = re.findall(r"loss ([\d.]+)", capsys.readouterr().out)
    assert losses[:3] == losses[3:]


@pytest.mark.long
def test_compressed_updates_train_as_well_in_fewer_bytes():
    training = example("compressed_training")
    flags = ["--rounds=12", "--shard_size=16"]
    found = [training.main([*flags, f"--runner={runner}"]) for runner in RUNNERS]
    assert found[0] == found[1]
    (floats, many), (eight, fewer), (ternary, fewest) = (found[0][m] for m in training.BITS)
    assert min(eight, ternary) > floats - 0.06 > 0.74
    assert many > 3.9 * fewer > 15 * fewest


def test_codecs_of_updates():
    """Rounding to the nearest of 255 levels; ternary numbers whose expectation is the number."""
    training = example("compressed_training")
    x = jax.random.normal(jax.random.key(0), (40, 5))
    codes, scale = training.eight_bits(x)
    assert (codes.dtype, int(jnp.max(jnp.abs(codes)))) == ("int8", 127)
    assert np.abs(np.asarray(training.decoded(codes, scale)) - x).max() <= 0.501 * scale
    received, owed = training.sent("8 bits", {"w": x}, {"w": 0.1 * x}, jax.random.key(1))
    np.testing.assert_allclose(received["w"] + owed["w"], 1.1 * x, rtol=1e-5)
    keys = jax.random.split(jax.random.key(2), 4000)
    codes, scales = jax.vmap(lambda key: training.ternary(x, key))(keys)
    assert np.unique(codes).tolist() == [-1, 0, 1]
    clipped = np.clip(x, -2.5 * np.std(x), 2.5 * np.std(x))
    error = scales[0] / 2 / 4000**0.5  # of the mean of the draws of a number, at most
    assert np.abs(np.asarray(codes, "f8").mean(0) * scales[0] - clipped).max() < 5 * error
    for codes, scale in (training.eight_bits(0 * x), training.ternary(0 * x, keys[0])):
        assert not np.any(training.decoded(codes, scale))
