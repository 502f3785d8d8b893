"""Reading a recipe: TOML in, overrides applied, every fault reported at once, JSON out."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.config.run import RunConfig, contradictions
from headrace.errors import ConfigError

Tree = dict[str, Any]


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config in TOML file ``path`` with ``a.b=c`` overrides applied.

    Raises ConfigError with one line for every fault.
    """
    tree = _read_toml(path)
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree, base=path.parent.absolute())


def parse_config(tree: Tree, *, base: Path | None = None) -> RunConfig:
    """Return the config a nested mapping describes; relative paths are read from ``base``."""
    try:
        text = json.dumps(tree)
    except TypeError as error:
        msg = f"recipe: {error}; dates and times are not used anywhere, write a string"
        raise ConfigError(msg) from error
    try:
        # Through JSON, because strict mode then still takes arrays for tuples and text for paths.
        config = RunConfig.model_validate_json(text, context={"base": base})
    except ValidationError as error:
        raise ConfigError(*_problems(error, tree)) from error
    problems = tuple(contradictions(config))
    if problems:
        raise ConfigError(*problems)
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as JSON that `parse_config` reads back."""
    return config.model_dump_json(indent=2) + "\n"


def _read_toml(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"recipe {path}: no such file"
        raise ConfigError(msg) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        msg = f"recipe {path}: {error}"
        raise ConfigError(msg) from error


def _apply_override(tree: Tree, override: str) -> None:
    """Set one ``a.b=value``; the value is read as TOML, or as text where it is not TOML."""
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        msg = f"--set {override}: write it as section.key=value"
        raise ConfigError(msg)
    *sections, leaf = key.strip().split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            msg = f"--set {override}: {section} is a value, not a section"
            raise ConfigError(msg)
        node = child
    node[leaf] = _toml_value(value)


def _toml_value(text: str) -> Any:  # noqa: ANN401 - whatever TOML can hold
    if text.strip() == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _problems(error: ValidationError, tree: Tree) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        yield _problem(detail, tree)


def _problem(detail: ErrorDetails, tree: Tree) -> str:
    location = _location(detail["loc"], tree)
    key = ".".join(location) or "recipe"
    match detail["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key{_suggestion(location)}"
        case "missing":
            return f"{key}: missing, and it has no default"
        case "value_error":
            return f"{key}: {detail['msg'].removeprefix('Value error, ')}"
        case _:
            return f"{key} = {json.dumps(detail['input'], default=str)}: {detail['msg']}"


def _location(parts: Sequence[int | str], tree: Tree) -> list[str]:
    """Drop the union tags that pydantic puts into a path but the user never wrote."""
    location: list[str] = []
    node: object = tree
    for position, part in enumerate(parts):
        if isinstance(node, Mapping) and part not in node and position + 1 < len(parts):
            continue
        location.append(str(part))
        node = node.get(part) if isinstance(node, Mapping) else None
    return location


def _suggestion(location: Sequence[str]) -> str:
    """Name the key that was probably meant, in its own section or in another one."""
    *sections, wrong = location
    keys = list(_all_keys(RunConfig))
    here = {path[-1]: path for path in keys if list(path[:-1]) == sections}
    close = difflib.get_close_matches(wrong, here, n=1)
    if close:
        return f"; did you mean {'.'.join(here[close[0]])}?"
    elsewhere = {path[-1]: path for path in keys}
    close = difflib.get_close_matches(wrong, elsewhere, n=1, cutoff=0.8)
    if close:
        return f"; did you mean {'.'.join(elsewhere[close[0]])}?"
    allowed = ", ".join(sorted(here))
    return f"; allowed here: {allowed}" if allowed else ""


def _all_keys(section: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key below ``section``; unions count with all their members."""
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield path
        for member in _sections_in(field.annotation):
            yield from _all_keys(member, path)


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from _sections_in(argument)
