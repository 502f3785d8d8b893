"""Reading a recipe: TOML in, overrides applied, one frozen config or every fault at once, JSON out.

`headrace.config.problems` words the faults; this module only reads.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config.problems import CheckedRecipe, Tree, check_tree
from headrace.config.run import RunConfig
from headrace.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config in TOML file ``path`` with ``a.b=c`` overrides applied.

    Raises ConfigError with one line for every fault.
    """
    return check_config(path, overrides).require()


def check_config(path: Path, overrides: Sequence[str] = ()) -> CheckedRecipe:
    """Return what `load_config` would, its faults, and what is well-formed beside them.

    Raises ConfigError when the file cannot be read as TOML at all.
    """
    tree = _read_toml(path)
    problems = [problem for override in overrides for problem in _apply_override(tree, override)]
    folder = path.parent.absolute()
    checked = _checked(tree, folder)
    return replace(checked, problems=(*problems, *checked.problems), folder=folder)


def parse_config(tree: Tree, *, base: Path | None = None) -> RunConfig:
    """Return the config a nested mapping describes; relative paths are read from ``base``.

    Raises ConfigError with one line for every fault, in the order of ``tree``.
    """
    return _checked(tree, base).require()


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as JSON that `parse_config` reads back."""
    return config.model_dump_json(indent=2) + "\n"


def _checked(tree: Tree, base: Path | None) -> CheckedRecipe:
    def validated(candidate: Tree) -> RunConfig:
        # Through JSON, because strict mode then still takes arrays for tuples and text for paths;
        # a date, which JSON lacks, becomes text here and has its own line among the problems.
        content = json.dumps(candidate, default=str)
        return RunConfig.model_validate_json(content, context={"base": base})

    return check_tree(tree, validated)


def _read_toml(path: Path) -> Tree:
    try:
        content = path.read_bytes()
    except OSError as error:
        msg = f"recipe {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(msg) from error
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        msg = f"recipe {path}: line {line} is not UTF-8 text"
        raise ConfigError(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"recipe {path}: not TOML: {error}"
        raise ConfigError(msg) from error
    except ValueError as error:
        msg = f"recipe {path}: a whole number in it has too many digits to be read"
        raise ConfigError(msg) from error


def _apply_override(tree: Tree, override: str) -> Iterator[str]:
    """Set one ``a.b=value`` in ``tree``, or yield what is wrong with it."""
    key, separator, value = override.partition("=")
    sections = _toml_key(key) if separator else ()
    if not sections:
        yield f"--set {override}: write it as section.key=value"
        return
    node = tree
    for section in sections[:-1]:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            yield f"--set {override}: {section} is a value, not a section"
            return
        node = child
    node[sections[-1]] = _toml_value(value)


def _toml_key(text: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, or none where TOML would not take it for one."""
    try:
        node: object = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    parts: list[str] = []
    while isinstance(node, Mapping) and len(node) == 1:
        part, node = next(iter(node.items()))
        parts.append(part)
    return () if isinstance(node, Mapping) else tuple(parts)


def _toml_value(text: str) -> Any:  # noqa: ANN401 - whatever TOML can hold
    """Read the value as TOML, or take it as text where it is not; ``null`` is no value."""
    if text.strip() == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # TOMLDecodeError, or a number of more digits than Python converts
        return text
    # A line break followed by a second key is TOML too, but not one value.
    return parsed["value"] if len(parsed) == 1 else text
