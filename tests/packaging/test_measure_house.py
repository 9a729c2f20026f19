"""What the table of the source's size and shape counts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from paths import ROOT

from scripts.measure_house import (
    code_lines,
    complexity,
    functions,
    import_cycles,
    is_nested,
    large_classes,
    large_folders,
    modules_per_folder,
    read_modules,
    reads_environment,
    sentences,
    table,
)

DECIDES = '''
def decides(values, flag):
    """Return something.

    A docstring is no code.
    """
    for value in values:
        if value and flag or not value:
            return [each for each in value if each]
    try:
        return 1 if flag else 2
    except ValueError:
        return lambda: 3 if flag else 4
'''


def write(directory: Path, modules: dict[str, str]) -> Path:
    for name, text in modules.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_complexity_and_lines_of_a_function(tmp_path: Path) -> None:
    (function,) = functions(read_modules(write(tmp_path, {"a/b.py": DECIDES}), ["a"]))
    # for, if, and, or, the comprehension and its condition, the conditional expression, except; the lambda has its own
    assert complexity(function) == 9
    assert code_lines(function) == 8


def test_simple_function_has_complexity_one() -> None:
    assert complexity(ast.parse("def f():\n    return 1").body[0]) == 1


def test_large_classes_and_folders_are_named(tmp_path: Path) -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(21))
    twice = "    @property\n    def m0(self): ...\n    @m0.setter\n    def m0(self, value): ...\n"
    modules = {f"a/wide/m{number}.py": "" for number in range(13)} | {"a/wide/__init__.py": ""}
    modules |= {f"a/narrow/m{number}.py": "" for number in range(12)}
    modules |= {"a/narrow/c.py": f"class Large:\n{methods}\nclass Small:\n{twice}{methods.replace('m20', 'm19')}"}
    found = read_modules(write(tmp_path, modules), ["a"])
    assert large_classes(found) == {"a.narrow.c.Large": 21}
    assert large_folders(found, tmp_path) == {"a/wide": 13, "a/narrow": 13}


def test_modules_that_import_each_other_are_a_cycle(tmp_path: Path) -> None:
    late = "def f():\n    import a.one\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import one\n"
    root = write(
        tmp_path,
        {
            "a/one.py": "from a.two import x\n",
            "a/two.py": "x = 1\nimport a.three\n",
            "a/three.py": late,
            "a/four.py": typed,
        },
    )
    assert import_cycles(read_modules(root, ["a"])) == []
    (root / "a" / "three.py").write_text("from a import one\n")
    assert import_cycles(read_modules(root, ["a"])) == [["a.one", "a.three", "a.two"]]


def test_sentences_are_those_of_docstrings_and_comments(tmp_path: Path) -> None:
    docstring = '"""One says that.\n\nAnother says what that is, which is much."""\n'
    text = f'{docstring}# A comment goes on\n# over two lines.\nx = "no # comment here"\n'
    (module,) = read_modules(write(tmp_path, {"a/b.py": text}), ["a"])
    found = list(sentences(module))
    assert found == ["One says that.", "Another says what that is, which is much.", "A comment goes on over two lines."]
    assert [is_nested(sentence) for sentence in found] == [False, True, False]


def test_modules_of_a_folder_and_readers_of_the_environment(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "a/__init__.py": "",
            "a/b.py": "import os\nx = os.environ",
            "a/c.py": "x = 1",
            "a/d/e.py": "from os import getenv",
        },
    )
    modules = read_modules(root, ["a"])
    assert modules_per_folder(modules, root) == {"a": 2, "a/d": 1}
    assert [module.name for module in modules if reads_environment(module)] == ["a.b", "a.d.e"]


@pytest.mark.slow
def test_the_table_of_this_checkout() -> None:
    rows = dict(table(ROOT, read_modules(ROOT)))
    assert rows["import cycles"] == "0"
    assert rows["files that read the environment"] == "1"
