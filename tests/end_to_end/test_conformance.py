"""Programs under `jit`, in this process and on Beam; docs/conformance.md says what they give.

Each row of the table runs once: the types and values of a reference and of `jax.jit`, the same bits
on both runners, and what is gathered.
"""

import re

import jax
import pytest
from conformance import ROWS, TABLE, TEXT, VERSION, Row, cells, markdown, read, reason
from programs import CASES

import beamjax as bj

WRITTEN = read()
IN_TABLE = {row.build for row in ROWS.values()}
GATHERED = ["passed", "gathered", "gathered"]
OTHERS = [name for name, case in CASES.items() if case.build not in IN_TABLE]


@pytest.fixture(autouse=True)
def quick_compilation():
    """Compiles in half of the time; settings are those of all tests again before the next one."""
    jax.config.update("jax_disable_most_optimizations", True)


def without_bytes(texts):
    return [re.sub(r"^gathered .*", "gathered", text) for text in texts]


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ROWS, ids=lambda key: ": ".join(key))
def test_a_row_is_what_running_it_gives(key):
    found, written = cells(ROWS[key]), WRITTEN[key]
    if f"with JAX {VERSION}." not in TEXT:  # Other versions gather other bytes.
        found, written = without_bytes(found), without_bytes(written)
    assert found == written, "write docs/conformance.md: python tests/conformance.py"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_other_programs(name):
    assert without_bytes(cells(Row(CASES[name].build))) in (["passed"] * 3, GATHERED)


def test_the_file_is_what_the_script_makes():
    version = re.search(r"with JAX (\S+)\.\n", TEXT)[1]
    assert markdown(WRITTEN).replace(f"JAX {VERSION}.", f"JAX {version}.") == TEXT


def test_no_row_fails():
    assert not [key for key, texts in WRITTEN.items() if any("fails" in text for text in texts)]
    assert all(TABLE.values())


def test_reasons_are_short():
    error = bj.StagingError("/a/b.py:3 (fn): a scan holds placed operators (map_fn). Do this")
    assert reason(error) == "a scan holds placed operators"
