"""The examples and the README: what they print is what they say."""

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
