"""What others may rely on: public names, the error tree, the roles' size, a light command."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys

import pytest

import headrace
from headrace import config, errors, roles

HEAVY = (
    "torch",
    "transformers",
    "pyarrow",
    "numpy",
    "pydantic",
    "datasets",
    "sympy",
    "flint",
)


def test_the_package_itself_offers_its_version_alone() -> None:
    assert headrace.__all__ == ["__version__"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", headrace.__version__)


def test_the_public_names_of_config_exist_and_are_sorted() -> None:
    assert config.__all__ == sorted(config.__all__)
    assert all(hasattr(config, name) for name in config.__all__)


def error_classes() -> dict[str, type[Exception]]:
    return {name: found for name, found in vars(errors).items() if inspect.isclass(found)
            and issubclass(found, Exception)}  # fmt: skip


def test_the_error_tree_in_the_docstring_is_the_real_one() -> None:
    tree = re.findall(r"^    ((?:\||\+--| )*)(\w+)", errors.__doc__ or "", re.MULTILINE)
    drawn: dict[str, str] = {}
    above: list[str] = []
    for indent, name in tree:
        depth = len(indent) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1] if depth else "Exception"
    real = {name: found.__bases__[0].__name__ for name, found in error_classes().items()}
    assert drawn == real


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_an_error_crosses_a_process_boundary(name: str) -> None:
    import pickle  # noqa: PLC0415 - what a process boundary does to it

    error = error_classes()[name]("first", "second")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - made one line above
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_a_role_has_at_most_four_methods() -> None:
    found = {
        name: [method for method in vars(role) if not method.startswith("_")]
        for name, role in vars(roles).items()
        if inspect.isclass(role) and role.__module__ == roles.__name__
    }
    assert set(found) == {
        "Generator",
        "Interruptible",
        "Verifier",
        "Learner",
        "WeightSync",
        "NoticeReceiver",
        "WeightStore",
        "WeightRoom",
        "WeightReader",
        "Monitor",
    }
    assert not [name for name, methods in found.items() if len(methods) > 4]


@pytest.mark.parametrize("module", ["headrace.types", "headrace.errors", "headrace.roles"])
def test_records_and_roles_import_nothing_heavy(module: str) -> None:
    assert imported_by(f"import {module}") == "[]"


@pytest.mark.skipif(
    importlib.util.find_spec("headrace.cli.__init__") is None, reason="no command line yet"
)
def test_the_help_of_the_command_imports_nothing_heavy() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from headrace.cli import main\n"
        "sys.argv = ['headrace', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main()"
    )
    assert imported_by(code) == "[]"


def imported_by(code: str) -> str:
    report = f"\nimport sys\nprint(sorted(sys.modules.keys() & set({HEAVY})))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
