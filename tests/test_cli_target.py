# ruff: noqa: F811
"""Functions by the text that names them."""

import sys

import pytest
from command_lines import folder  # noqa: F401 (a fixture)

from beamjax import cli
from beamjax.commands.target import find_target, functions_of
from beamjax.errors import OptionsError
from beamjax.suggestions import closest, hint, listed


@pytest.mark.parametrize(
    "text",
    [
        "programs_here:loss",
        "programs_here.py:loss",
        "./programs_here.py:loss",
        "{0}/programs_here.py:loss",
    ],
)
def test_functions_of_modules_and_files(folder, text):
    assert find_target(text.format(folder)).__name__ == "loss"


def test_what_is_in_an_object_and_in_an_installed_module(folder):
    assert find_target("programs_here:Model.mean").__name__ == "mean"
    assert find_target("json.decoder:JSONDecoder.decode").__name__ == "decode"


def test_a_file_with_the_name_of_another_module(folder):
    (folder / "json.py").write_text("def fn():\n    return 1\n")
    import json

    assert find_target("json.py:fn")() == 1
    assert sys.modules["json"] is json
    assert hasattr(json, "dumps")


def test_a_file_is_read_again(folder):
    (folder / "again_here.py").write_text("def fn():\n    return 1\n")
    try:
        assert find_target("again_here.py:fn")() == 1
        (folder / "again_here.py").write_text("def fn():\n    return 20\n")
        assert find_target("again_here.py:fn")() == 20
    finally:
        del sys.modules["again_here"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("programs_here:los", "found no 'los', expected one of: Model, broken, chosen, embed, "),
        ("programs_here:los", "did you mean 'loss'?"),
        ("programs_here:Model.mea", "found no 'mea', expected one of: mean; did you mean 'mean'?"),
        ("programs_here:NUMBER", "found an int, expected a function; those there: Model, broken"),
        ("programs_her:loss", "programs_her: found no such module; did you mean 'programs_here'?"),
        ("nobody_knows:loss", "found no such module, here or among what is installed; files here"),
        ("programs_her.py:loss", "found no such file; did you mean 'programs_here.py'?"),
        ("programs_here", "found no function, expected module:function or file.py:function; funct"),
        ("programs_here.py", "functions there: Model, broken"),
        ("programs_here.py:", "functions there: Model, broken"),
        (":loss", "found no function, expected module:function"),
        ("2", "2: found no function, expected module:function or file.py:function"),
        ("a b:loss", "a b: found no such module"),
        ("..:loss", "found no name of a module"),
        ("json.nothing:loss", "json.nothing: found no such module"),
    ],
)
def test_what_is_not_there(folder, text, message):
    with pytest.raises(OptionsError) as raised:
        find_target(text)
    assert message in str(raised.value)


def test_errors_of_the_module_itself_are_those_of_the_user(folder, capsys):
    (folder / "bad_here.py").write_text("import json\nimport nobody_knows_this\n")
    with pytest.raises(ModuleNotFoundError, match="nobody_knows_this"):
        find_target("bad_here:fn")
    assert cli.main(["run", "bad_here.py:fn"]) == 1
    told = capsys.readouterr().err
    assert 'bad_here.py", line 2, in <module>' in told
    assert "ModuleNotFoundError: No module named 'nobody_knows_this'" in told
    assert "importlib" not in told


def test_functions_that_a_module_defines_come_before_those_that_it_imports():
    import json
    import string

    assert "dumps" in functions_of(json)
    assert "Template" in functions_of(string)
    assert functions_of(sys.modules[__name__])[0].startswith("test_")


@pytest.mark.parametrize(
    ("name", "names", "found"),
    [
        ("wieghts", ["weights", "x"], "weights"),
        ("Weights", ["weights"], "weights"),
        ("zzz", ["weights"], None),
        ("a", [], None),
    ],
)
def test_the_closest_name(name, names, found):
    assert closest(name, names) == found
    assert hint(name, names) == (f"; did you mean {found!r}?" if found else "")


def test_lists_of_names():
    assert listed([]) == "none"
    assert listed("ab") == "a, b"
    assert listed(map(str, range(14))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"
