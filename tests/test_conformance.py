"""The conformance table in docs/ says what running its rows gives."""

import re

import pytest
from conformance import PATH, ROWS, TABLE, VERSION, cells, markdown, reason

import beamjax as bj

TEXT = PATH.read_text(encoding="utf-8")


def read():
    """The cells of the table in docs/."""
    found, section = {}, ""
    for line in TEXT.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("|  |", "| ---")):
            name, *texts = re.split(r" \| ", line[2:-2])
            found[section, name] = texts
    return found


WRITTEN = read()


def without_bytes(texts):
    return [re.sub(r"^gathered .*", "gathered", text) for text in texts]


@pytest.mark.table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ROWS, ids=lambda key: ": ".join(key))
def test_a_row_is_what_running_it_gives(key):
    found, written = cells(ROWS[key]), WRITTEN[key]
    if f"with JAX {VERSION}." not in TEXT:  # Other versions gather other bytes.
        found, written = without_bytes(found), without_bytes(written)
    assert found == written, "write docs/conformance.md: python tests/conformance.py --write"


def test_the_file_is_what_the_script_makes():
    version = re.search(r"with JAX (\S+)\.\n", TEXT)[1]
    assert markdown(WRITTEN).replace(f"JAX {VERSION}.", f"JAX {version}.") == TEXT


def test_no_row_fails():
    assert not [key for key, texts in WRITTEN.items() if any("fails" in text for text in texts)]
    assert all(TABLE.values())


def test_reasons_are_short():
    error = bj.StagingError("/a/b.py:3 (fn): a scan holds placed operators (map_fn). Do this")
    assert reason(error) == "a scan holds placed operators"
