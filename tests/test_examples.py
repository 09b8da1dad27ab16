"""The examples and the README: what they print is what they say."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"^round .* accuracy .* ([\d.]+)%$", printed, re.M)]


def code_block(language: str, containing: str = "") -> str:
    """The first block of the README in this language that holds this text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    return next(block for block in blocks if containing in block)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_federated_digits_learns(runner: str, capsys: pytest.CaptureFixture[str]) -> None:
    final = example("federated_digits").main(["--rounds=4", f"--runner={runner}"])
    printed = capsys.readouterr().out
    found = accuracies(printed)
    assert len(found) == 4
    assert found == sorted(found)
    assert found[-1] > 80
    assert f"{final:.1%}" == f"{found[-1]}%"
    assert f"federated_round on {runner} against jit: 9 leaves" in printed
    assert "all within the tolerance" in printed
    assert "FAILED" not in printed


def test_federated_digits_deals_unequal_and_skewed_clients() -> None:
    digits = example("federated_digits")
    rng = digits.np.random.default_rng(0)
    labels = rng.integers(digits.CLASSES, size=1437)
    images = rng.normal(size=(1437, 64)).astype("float32")
    clients, counts = digits.deal(images, labels, rng)
    dealt_images, dealt_labels, mask = clients.read(0, digits.CLIENTS)
    assert counts.tolist() == sorted(mask.sum(axis=1))
    assert counts.sum() == 1437
    assert counts.min() >= 1
    assert counts.max() > 4 * digits.np.median(counts)
    assert dealt_images[mask == 0].any() == False  # noqa: E712  (a numpy bool)
    kinds = [len(set(dealt_labels[i][mask[i] > 0])) for i in range(digits.CLIENTS)]
    assert digits.np.median(kinds) < digits.CLASSES / 2
    assert sorted(dealt_labels[mask > 0]) == sorted(labels)


def test_federated_digits_hands_other_flags_on(capsys: pytest.CaptureFixture[str]) -> None:
    digits = example("federated_digits")
    with pytest.raises(digits.bj.OptionsError, match="shard_size: found 3"):
        digits.main(["--rounds=1", "--runner=local", "--shard_size=3"])
    assert "100 clients" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--slopes"]])
def test_monte_carlo_comes_near_the_formula_with_the_same_bits_everywhere(flags: list[str]) -> None:
    monte_carlo = example("monte_carlo")
    flags = ["--paths=200_000", *flags]
    found = monte_carlo.main([*flags, "--runner=local"])
    assert found == monte_carlo.main([*flags, "--runner=DirectRunner"])
    estimate, expected = found["price"]
    assert abs(estimate - expected) < 4 * 9.04 / 200_000**0.5
    for name in monte_carlo.MARKET if "--slopes" in flags else ():
        estimate, expected = found[f"slope in {name}"]
        assert estimate == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_corpus_pca_finds_the_axes_of_numpy(runner: str, tmp_path: Path) -> None:
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


def test_corpus_pca_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = example("corpus_pca").main(["--gigabytes=0.001", f"--folder={tmp_path}"])
    printed = capsys.readouterr().out
    assert "244 documents of 4096 letters written" in printed
    assert shares.sum() == pytest.approx(1, abs=1e-5)
    told = [re.findall(r"[\d.]+%", line) for line in printed.splitlines()[-2:]]
    assert told[0] == told[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_federated_table_learns_what_is_behind_the_labels(
    runner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rows=20_000", "--clients=500", "--cohort=200", "--rounds=3", f"--runner={runner}"]
    assert example("federated_table").main(flags) > 0.97
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^round \d  200 clients  loss ([\d.]+)", printed, re.M)]
    assert losses[0] == 0.6931
    assert max(losses[1:]) < 0.6


def test_federated_table_is_what_jit_gives(tmp_path: Path) -> None:
    table = example("federated_table")
    table.write_table(tmp_path, 2_000, 50, table.np.random.default_rng(0))
    clients = table.bj.from_parquet(
        tmp_path, text_bytes=16, group_by="client", folder=tmp_path / "grouped"
    )
    weights = table.jnp.zeros(table.WIDTH)
    assert table.bj.verify(table.federated_round, weights, clients, runner="local").ok


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_kmeans_digits_ends_where_sklearn_does(runner: str) -> None:
    ours, truth = example("kmeans_digits").main(["--restarts=2", f"--runner={runner}"])
    assert ours == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_private_statistics_drops_whom_it_says_and_comes_near(
    runner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    private, true = example("private_statistics").main([f"--runner={runner}"])
    assert private == pytest.approx(true, rel=0.1)
    printed = capsys.readouterr().out
    assert "dropped: patients 7, 100, 101;" in printed
    assert "true: 439" in printed


def test_private_statistics_clips_members_and_is_right_without_noise() -> None:
    private = example("private_statistics")
    np = private.np
    rows = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
    norms = np.linalg.norm(rows.astype("float64"), axis=1)
    key = private.jax.random.key(0)
    sums, count, share = private.bj.run(private.private_sum, key, 2.0, 0.0, rows, runner="local")
    expected = (rows * np.minimum(1, 2 / norms)[:, None]).sum(axis=0)
    np.testing.assert_allclose(sums, expected, atol=1e-5)
    assert float(count) == 50
    assert float(share) == pytest.approx(np.mean(norms > 2))


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_self_tuning_rate_lowers_the_loss(runner: str) -> None:
    losses = example("self_tuning_rate").main(["--steps=3", f"--runner={runner}"])
    assert losses == sorted(losses, reverse=True)


def test_self_tuning_rate_has_the_slope_of_the_loss() -> None:
    tuning = example("self_tuning_rate")
    training, held_out = tuning.dealt()
    rates = {"client": tuning.jnp.log(0.3), "server": tuning.jnp.log(2.0)}
    run = functools.partial(tuning.bj.run, runner="local")
    slopes = run(tuning.jax.grad(tuning.held_out_loss), rates, training, held_out)
    for name in rates:
        up, down = (
            float(run(tuning.held_out_loss, rates | {name: rates[name] + s}, training, held_out))
            for s in (0.02, -0.02)
        )
        assert float(slopes[name]) == pytest.approx((up - down) / 0.04, rel=1e-2)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_clustered_clients_find_their_like(runner: str) -> None:
    assert example("clustered_clients").main(["--rounds=4", f"--runner={runner}"]) == 1


def test_diloco_text_learns_with_the_same_bits_everywhere() -> None:
    diloco = example("diloco_text")
    with diloco.jax.numpy_dtype_promotion("standard"):  # optax needs it
        losses = diloco.main(["--rounds=2", "--runner=local"])
        assert 3 < losses[1] < losses[0] < 7
        assert diloco.main(["--rounds=2"]) == losses


def test_influence_tells_what_a_fit_without_the_patient_shows() -> None:
    found, truth = example("influence").main(["--top=3", "--runner=local"])
    assert found == pytest.approx(truth, rel=0.35)


def test_influence_has_the_same_bits_on_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    influence = example("influence")
    monkeypatch.setattr(influence, "NEWTON_STEPS", 2)
    monkeypatch.setattr(influence, "SOLVER_STEPS", 3)
    (local, _), (beam, _) = (
        influence.main(["--top=3", f"--runner={runner}"]) for runner in ("local", "DirectRunner")
    )
    assert local.tobytes() == beam.tobytes()


@pytest.mark.long
def test_cnn_clients_learn_with_the_same_bits_everywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cnn = example("cnn_clients")
    allow = cnn.jax.numpy_rank_promotion("allow")  # optax and stax need these two
    with cnn.jax.numpy_dtype_promotion("standard"), allow:
        found = [
            cnn.main(["--rounds=3", "--clients=20", f"--runner={runner}"])
            for runner in ("local", "DirectRunner")
        ]
    assert found[0] == found[1]
    assert found[0][-1] > 0.25
    losses = re.findall(r"loss ([\d.]+)", capsys.readouterr().out)
    assert losses[:3] == losses[3:]


def test_own_pipeline_finds_what_numpy_finds() -> None:
    solved, descended, truth = example("own_pipeline").main(["--rounds=2000"])
    assert solved == pytest.approx(truth, abs=1e-4)
    assert descended == pytest.approx(truth, abs=1e-2)


def test_compressed_updates_train_as_well_in_fewer_bytes() -> None:
    training = example("compressed_training")
    found = [
        training.main(["--rounds=12", "--shard_size=16", f"--runner={runner}"])
        for runner in ("local", "DirectRunner")
    ]
    assert found[0] == found[1]
    (floats, many), (int8, fewer), (ternary, fewest) = (found[0][m] for m in training.METHODS)
    assert floats > 0.8
    assert min(int8, ternary) > floats - 0.06
    assert many > 1.9 * fewer
    assert fewer > 1.9 * fewest


def test_clients_under_a_budget_cost_no_more_and_gain_more() -> None:
    budgeted = example("budgeted_clients")
    found = budgeted.main(["--rounds=3", "--runner=local"])
    assert found["gain per cost"][0] > found["at random"][0]
    assert found["gain per cost"][-1] > 0.85
    np, rng = budgeted.np, budgeted.np.random.default_rng(1)
    for _ in range(50):
        gain, cost = rng.random(9), rng.random(9) + 0.05
        taken = budgeted.greedy(gain, cost, 1.1)
        assert cost[taken].sum() <= 1.1
        sets = ((np.arange(512)[:, None] >> np.arange(9)) & 1).astype(bool)
        best = max(gain[s].sum() for s in sets if cost[s].sum() <= 1.1)
        assert gain[taken].sum() >= best / 2


def test_four_devices_find_what_scikit_learn_finds_patient_by_patient() -> None:
    loss, wrong, same, by_mesh = example("four_devices").main([])
    assert same
    assert by_mesh == pytest.approx(loss, abs=2e-5)
    # LogisticRegression(C=1, fit_intercept=False), on each of the 569 sets without one patient.
    assert loss == pytest.approx(0.0751385, abs=2e-5)
    assert wrong == pytest.approx(12 / 569, abs=1e-6)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_are_short_and_say_how_they_are_called(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert f"    python examples/{path.name} " in text
    assert "--runner" in text
    assert f"examples/{path.name}" in README
    shown = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert f"{{literalinclude}} ../examples/{path.name}" in shown


def test_the_readme_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code_block("python"), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == code_block("text", "step 0")


def test_the_readme_shows_what_federated_digits_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = accuracies(code_block("text", "round  1"))
    example("federated_digits").main([f"--rounds={len(shown)}", "--runner=local"])
    assert accuracies(capsys.readouterr().out) == pytest.approx(shown, abs=1.0)


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
