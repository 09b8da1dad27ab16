# ruff: noqa: F811
"""Values of arguments, by their text, and the parameters that they go to."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from command_lines import folder  # noqa: F401 (a fixture)
from helpers import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st

from beamjax.commands.calls import flag_value, make_call, parsed
from beamjax.commands.cli_values import nested, read_value
from beamjax.commands.functions import run
from beamjax.commands.output import named_leaves, plain, write_out
from beamjax.errors import BeamjaxError, OptionsError, SourceError


def test_json():
    for text, expected in (
        ("3", 3),
        ("-0.5", -0.5),
        ("true", True),
        ("null", None),
        ("NaN", float("nan")),
        ("[1, 2]", jnp.array([1, 2], "int32")),
        ("[[1.5], [2]]", jnp.array([[1.5], [2]], "float32")),
        ("[[1], [2, 3]]", [jnp.array([1]), jnp.array([2, 3])]),
        ("[]", []),
        ('{"w": [1.0], "b": 2}', {"w": jnp.array([1.0]), "b": 2}),
    ):
        assert_same_bits(read_value(text, "x"), expected)
    flags = {"3": 3, "true": True, "mean": "mean", "[1]": [1], '"3"': "3", "": True}
    (parameter,) = inspect.signature(lambda x: x).parameters.values()
    assert {text: flag_value(parameter, text) for text in flags} == flags


def test_files(folder):
    found = read_value("x.npy", "x")
    assert isinstance(found, np.memmap)
    x = np.load("x.npy")
    assert_same_bits(np.asarray(found), x)
    assert_same_bits(read_value("w.npz", "x"), {"model": {"weights": np.ones(3, np.float32)}})
    source = read_value("parts/*.npy", "x")
    assert_same_bits(source.read(0, len(source))[0], x)
    table = pa.table({"x": np.arange(9, dtype="float32"), "label": np.arange(9)})
    pyarrow.parquet.write_table(table, "rows.parquet")
    assert read_value("rows.parquet", "x").read(2, 3)[1] == 2
    assert read_value("*.parquet", "x").read(2, 3)[1] == 2


NO_VALUES = [
    ("wx.npz", "wx.npz: found no such file; did you mean 'w.npz'?"),
    ("partz/x.npy", "there is no folder 'partz'"),
    ("programs_here.py", "or a name that ends in .npy, .npz"),
    ("parts", "found 'parts', expected JSON, the folder of a result"),
    ("hello", "For anything else, give a job as TARGET"),
    ('"hello"', "x: found the text 'hello', expected numbers"),
    ("[[1, 3000000000]]", "x[0][1]: found 3000000000, which does not fit int32"),
    ('{"a": ["b"]}', "x['a'][0]: found the text 'b'"),
    ("nothing/*.npy", "nothing/*.npy"),
    ("bad.npy", "bad.npy"),
    ("objects.npy", "objects.npy"),
]


def test_what_is_no_value(folder):
    (folder / "bad.npy").write_bytes(b"nothing")
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for text, message in NO_VALUES:
        with pytest.raises(BeamjaxError) as raised:
            read_value(text, "x")
        assert message in str(raised.value)
        if message == text and "*" not in text:
            assert isinstance(raised.value, SourceError)


_trees = st.recursive(
    st.integers(-5, 5),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1), inner, min_size=1, max_size=3)
    ),
)


@given(_trees)
def test_names_of_leaves_make_the_tree_again(tree):
    flat = {name: leaf for _, name, leaf in named_leaves(tree)}
    assert nested(flat) == ({"result": tree} if isinstance(tree, int) else tree)


def test_results_in_files(tmp_path):
    for leaf, expected in (
        (jnp.array([1, 2], "bfloat16"), np.array([1, 2], "float32")),
        (jnp.array([1, 2], "float8_e4m3fn"), np.array([1, 2], "float32")),
        (jnp.array([1, -2], "int4"), np.array([1, -2], "int8")),
        (jnp.array([1, 2], "uint16"), np.array([1, 2], "uint16")),
        (jax.random.key(3), np.array([0, 3], "uint32")),
        (np.zeros((2,), jax.dtypes.float0), np.zeros(2, bool)),
    ):
        assert_same_bits(plain(leaf), expected)
        write_out(leaf, str(tmp_path / "a.npy"))
        assert_same_bits(np.load(tmp_path / "a.npy"), expected)
    tree = {"file": jnp.arange(3), "self": {"args": jnp.float32(1)}, "": [jnp.zeros((0, 2))]}
    path = str(tmp_path / "a.npz")
    write_out(tree, path)
    assert_same_bits(read_value(path, "x"), jax.tree.map(np.asarray, tree))
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(SourceError, match="one is in the other"):
        nested({"a": 1, "a/b": 2})


# --- parameters


def call_of(target, *given, flags=()):
    argv = ["run", target, *(f"--arg={text}" for text in given), *flags]
    return make_call(parsed(run, argv)).load()


def test_calls(folder):
    fn, args = call_of("programs_here:embed", "x=three.npy", "w=2")
    import programs_here

    assert fn is programs_here.embed
    assert args[0] == 2
    (folder / "named_here.py").write_text(
        "def fn(a, b=2, c=3, *, d, e=5, **more):\n    return a, b, c, d, e, more\n"
    )
    fn, args = call_of("named_here.py:fn", "d=40", "a=1", "c=30", "z=7")
    assert fn.__name__ == "fn"
    assert fn(*args) == (1, 2, 30, 40, 5, {"z": 7})


NO_CALLS = [
    ("embed", ["w=1"], [], "embed(w, x): add --arg x=..."),
    ("embed", ["w=1", "X=1"], [], "no such parameter in embed(w, x); did you mean 'x'"),
    ("embed", ["w=1", "w=2"], [], "--arg w: found twice: '1' and '2'"),
    ("embed", ["w"], [], "--arg w: expected name=value"),
    ("embed", ["x=hello", "w=1"], [], "--arg x: found 'hello'"),
    ("embed", [], ["--w=1"], "embed(w, x): add --arg x=...; or --x=..., if it returns a function"),
    ("nothing", [], [], "it returned 3; expected a tuple of a function and its arguments"),
]


def test_what_does_not_fit_the_signature(folder):
    for target, pairs, flags, message in NO_CALLS:
        with pytest.raises(OptionsError) as raised:
            call_of(f"programs_here:{target}", *pairs, flags=flags)
        assert message in str(raised.value)
