# ruff: noqa: F811
"""Values of arguments, by their text, and the parameters that they go to."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from command_lines import folder  # noqa: F401 (a fixture)
from hypothesis import given
from hypothesis import strategies as st
from tfrecords import example, write

import beamjax
from beamjax.commands.arguments.binding import find_call
from beamjax.commands.arguments.value_help import VALUES
from beamjax.commands.arguments.values import KINDS, nested, read_value, static_value
from beamjax.commands.output import named_leaves, plain, write_out
from beamjax.errors import BeamjaxError, OptionsError, SourceError


def same(found, expected):
    """Equal trees of arrays, with equal dtypes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b) or a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_literals_keys_and_ranges():
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
        ("float32:0.5", jnp.float32(0.5)),
        ("uint8:[1, 2]", jnp.array([1, 2], "uint8")),
        ("bfloat16:[1, 2]", jnp.array([1, 2], "bfloat16")),
        ("bool:[true, false]", jnp.array([True, False])),
    ):
        same(read_value(text, "x"), expected)
    key = read_value("key:7", "x")
    assert key.dtype == jax.random.key(7).dtype
    same(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))
    assert len(read_value("range:1_000_000", "x")) == 10**6
    static = {"3": 3, "true": True, "mean": "mean", "[1]": [1], '"3"': "3"}
    assert {text: static_value(text) for text in static} == static
    assert not [name for name in KINDS if name not in VALUES]


def test_files_of_numpy_and_json(folder):
    found = read_value("x.npy", "x")
    assert isinstance(found, np.memmap)
    same(np.asarray(found), np.load("x.npy"))
    same(read_value("array:x.npy", "x"), found)
    same(read_value("w.npz", "x"), {"model": {"weights": np.ones(3, np.float32)}})
    same(read_value("w.npz#at=model/weights", "x"), np.ones(3, np.float32))
    (folder / "t.json").write_text('{"a": [1, 2], "b": {"c": 0.5}}')
    same(read_value("t.json", "x"), {"a": jnp.array([1, 2]), "b": {"c": 0.5}})
    (folder / "odd").write_bytes((folder / "x.npy").read_bytes())
    same(read_value("array:odd", "x"), found)


def test_files_whose_rows_are_members(folder):
    x = np.load("x.npy")
    for text in ("npy:x.npy", "parts/*.npy", "parts/x-?0.npy", "npy:parts/x-*.npy"):
        source = read_value(text, "x")
        assert isinstance(source, beamjax.Source)
        same(source.read(0, len(source))[0], x)
    table = pa.table({"x": np.arange(9, dtype="float32"), "label": np.arange(9)})
    pyarrow.parquet.write_table(table, "rows.parquet")
    assert read_value("rows.parquet", "x").read(2, 3)[1] == 2
    source = read_value("*.parquet#columns=label", "x")
    assert [leaf.path for leaf in source.leaves] == ["['label']"]
    np.savez("rows.npz", a=x, b=x[:, 0])
    assert len(read_value("npz:rows.npz", "x").leaves) == 2
    records = [example({"image": bytes([i, 0, 1, 2]), "label": np.array([i])}) for i in range(5)]
    write("r.tfrecord", records)
    source = read_value("r.tfrecord#image=uint8[2,2]&label=int32[]", "x")
    assert [(leaf.shape, leaf.dtype.name) for leaf in source.leaves] == [
        ((2, 2), "uint8"), ((), "int32"),
    ]  # fmt: skip
    assert source.read(3, 4)[0].tolist() == [[[3, 0], [1, 2]]]


NO_VALUES = [
    ("wx.npz", "wx.npz: found no such file; did you mean 'w.npz'?"),
    ("partz/x.npy", "the folder 'partz' is not there"),
    ("programs_here.py", "expected a name that ends in .npy, .npz, .json"),
    ("parts", "parts is a folder with none of placed.json"),
    ("rnage:5", "found the kind 'rnage'; did you mean 'range'?"),
    ("range:x", "found 'x', expected a whole number"),
    ("float32:x", "found 'x', expected a number or a list of numbers"),
    ("hello", "expected a number, JSON, or a file that is there"),
    ('"hello"', "a value that is no data is given as --static name=value"),
    ('{"a": ["b"]}', "x['a'][0]: found the text 'b'"),
    ("w.npz#at=modle", "found no 'modle' of 'modle', expected one of: model; did you mean 'mo"),
    ("w.npz#att=model", "found 'att' after '#' in 'w.npz#att=model', expected for array: at"),
    ("r.tfrecord#x=uint[3]", "found the type 'uint[3]', expected one such as float32[28,28]"),
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
        same(plain(leaf), expected)
        write_out(leaf, str(tmp_path / "a.npy"))
        same(np.load(tmp_path / "a.npy"), expected)
    tree = {"file": jnp.arange(3), "self": {"args": jnp.float32(1)}, "": [jnp.zeros((0, 2))]}
    path = str(tmp_path / "a.npz")
    write_out(tree, path)
    same(read_value(path, "x"), jax.tree.map(np.asarray, tree))
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(SourceError, match="one is in the other"):
        nested({"a": 1, "a/b": 2})


# --- parameters


def test_calls(folder):
    call = find_call("programs_here:embed", ["x=range:3", "w=2"], [])
    import programs_here

    assert call.fn is programs_here.embed
    assert (call.args[0], call.name) == (2, "embed")
    (folder / "named_here.py").write_text(
        "def fn(a, b=2, c=3, *, d, e=5, **more):\n    return a, b, c, d, e, more\n"
    )
    call = find_call("named_here.py:fn", ["d=40", "a=1", "c=30", "z=7"], ["e=mean"])
    assert (call.args, call.name) == ((1, 30, 40, 7), "fn")
    assert call.fn(*call.args) == (1, 2, 30, 40, "mean", {"z": 7})


NO_CALLS = [
    ("embed", ["w=1"], [], "embed(w, x): add --arg x=..."),
    ("embed", ["w=1", "X=1"], [], "no such parameter in embed(w, x); did you mean 'x'"),
    ("embed", ["w=1", "w=2"], [], "--arg w: found twice: '1' and '2'"),
    ("embed", ["w=1", "0=2"], [], "w of embed(w, x) is given twice"),
    ("embed", ["w"], [], "--arg w: expected name=value"),
    ("embed", ["w=1", "x=1"], ["x=2"], "x: found both as --arg and as --static"),
    ("embed", ["x=1"], ["v=2"], "--static v: there is no such parameter"),
    ("embed", ["w=1", "x=hello"], [], "--arg x: found 'hello'"),
    ("total", ["0=1", "2=1"], [], "found the positions [0, 2], expected no gaps"),
]
NO_FACTORIES = [
    ("nothing", [], [], "as a factory it returned 3, expected a function, or a tuple"),
    ("prepared", ["x=1"], [], "--arg x=1: the arguments come with the function"),
    ("chosen", [], ["nam=loss"], "--static nam: there is no such parameter in programs_here:"),
]


def test_what_does_not_fit_the_signature(folder):
    for factory, rows in ((False, NO_CALLS), (True, NO_FACTORIES)):
        for target, arguments, static, message in rows:
            with pytest.raises(OptionsError) as raised:
                find_call(f"programs_here:{target}", arguments, static, factory=factory)
            assert message in str(raised.value)
