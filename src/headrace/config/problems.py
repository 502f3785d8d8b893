"""The faults of a recipe, worded for the person who wrote it.

Owns the promise that one attempt reports everything: settings that contradict each other are
found even where other keys are wrong, unless they rest on those, and what is well-formed stays
usable for the checks of model and data. Decides nothing about validity.
"""

from __future__ import annotations

import copy
import datetime as dt
import difflib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.config.run import RunConfig, contradictions
from headrace.config.schema import Place, all_keys, place_of, sections_in, tags
from headrace.errors import ConfigError

Tree = dict[str, Any]
Path = tuple[str, ...]

_REQUIRED: Mapping[Path, object] = {
    ("model",): {"path": "any"},
    ("data", "train"): {"type": "jsonl", "path": "any"},
    ("verifier",): {"components": {"any": {"kind": "exact"}}},
}
"""Stands in for a faulty required section while the other settings are compared."""

_INT_LIMIT = 2**64
"""Every whole number ends in a tensor, a seed or a size, none of which is wider."""

_MAX_SHOWN = 80
"""Characters of a wrong value that a message quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecipe:
    """A recipe as far as it is known."""

    config: RunConfig
    """Without the keys at fault; something stands in for required ones."""
    problems: tuple[str, ...]
    """One line for each fault, in the order of the recipe."""
    faulty: frozenset[Path]
    """Paths of the keys at fault."""
    folder: pathlib.Path | None = None
    """Where the recipe lies; relative paths in it are read from there first."""

    def knows(self, *path: str) -> bool:
        """Whether neither ``path`` nor anything above or below it is at fault."""
        return all(path[: len(fault)] != fault[: len(path)] for fault in self.faulty)

    def require(self) -> RunConfig:
        """Return the config. Raises ConfigError with every problem."""
        if self.problems:
            raise ConfigError(*self.problems)
        return self.config


def check_tree(tree: Tree, validated: Callable[[Tree], RunConfig]) -> CheckedRecipe:
    """Find every fault of ``tree``.

    ``validated`` tries a tree; it raises ValidationError where that has faults.
    """
    found = list(_unfit_values(tree))
    faulty = {path for path, _ in found}
    try:
        config = validated(tree)
    except ValidationError as error:
        wrong = [(place.path, text) for place, text in _wrong_keys(error, tree)]
        found += [(path, text) for path, text in wrong if path not in faulty]
        config, taken_out = _repaired(error, tree, validated)
        faulty |= taken_out
    checked = CheckedRecipe(config=config, problems=(), faulty=frozenset(faulty))
    for contradiction in contradictions(config):
        keys = [tuple(key.split(".")) for key in contradiction.keys]
        if all(checked.knows(*key) for key in keys):
            found.append((min(keys, key=lambda key: _order(key, tree)), contradiction.text))
    ordered = sorted(found, key=lambda item: _order(item[0], tree))
    # A list with two wrong entries is one line; dict.fromkeys keeps the order.
    return replace(checked, problems=tuple(dict.fromkeys(text for _, text in ordered)))


def _unfit_values(tree: Tree, above: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield path and line of every TOML value that no key can take: times and endless numbers."""
    for name, value in tree.items():
        path = (*above, name)
        if isinstance(value, dict):
            yield from _unfit_values(value, path)
            continue
        items = value if isinstance(value, list) else [value]
        if any(_is_time(item) for item in items):
            line = f"{'.'.join(path)} = {value}: dates and times are not used anywhere"
            yield path, f"{line}; write it in quotes"
        elif any(isinstance(item, int) and abs(item) > _INT_LIMIT for item in items):
            line = f"{'.'.join(path)} = {_shown(value)}"
            yield path, f"{line}: no whole number here may lie beyond 2^64"


def _is_time(value: object) -> bool:
    return isinstance(value, dt.date | dt.time)


def _order(path: Path, tree: Tree) -> tuple[int, ...]:
    """Return a sort key: the position of each part in its table, after all others if absent."""
    positions: list[int] = []
    node: object = tree
    for part in path:
        names = list(node) if isinstance(node, Mapping) else []
        positions.append(names.index(part) if part in names else len(names))
        node = node[part] if isinstance(node, Mapping) and part in node else None
    return tuple(positions)


def _wrong_keys(error: ValidationError, tree: Tree) -> Iterator[tuple[Place, str]]:
    for detail in error.errors(include_url=False):
        place = place_of(detail["loc"])
        yield place, _problem(place, detail, tree)


def _problem(place: Place, detail: ErrorDetails, tree: Tree) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return f"{place.key}: unknown key{_suggestion(place)}"
        case "value_error":
            text = detail["msg"].removeprefix("Value error, ")
            return text if text.startswith(place.key) else f"{place.key}: {text}"
        case "union_tag_not_found" | "union_tag_invalid":
            return _wrong_tag(place, detail)
        case "string_pattern_mismatch":
            allowed = f"text that matches {detail['ctx']['pattern']}"
        case _:
            allowed = place.allowed
    value, present = _value_at(place.path, tree)
    if not present:
        return f"{place.key}: missing, and it has no default; must be {allowed}"
    return f"{place.key} = {_shown(value)}: must be {allowed}"


def _wrong_tag(place: Place, detail: ErrorDetails) -> str:
    name = detail["ctx"]["discriminator"].strip("'")
    allowed = f"must be one of {tags(sections_in(place.annotation))}"
    if detail["type"] == "union_tag_not_found":
        return f"{place.key}.{name}: missing; {allowed}"
    return f"{place.key}.{name} = {_shown(detail['input'][name])}: {allowed}"


def _value_at(path: Path, tree: Tree) -> tuple[object, bool]:
    node: object = tree
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return None, False
        node = node[part]
    return node, True


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _suggestion(place: Place) -> str:
    """Name the key that was probably meant.

    The same name elsewhere wins over a similar one here: a right key in a wrong section is the
    likelier slip.
    """
    *above, wrong = place.path
    rivals = [rival for rival in place.rivals if wrong in rival.model_fields]
    if rivals:
        return f"; only {tags(rivals)} has it"
    elsewhere = dict.fromkeys(all_keys(RunConfig))
    here = [] if place.section is None else list(place.section.model_fields)
    same = [".".join(path) for path in elsewhere if path[-1] == wrong]
    if same:
        return f"; did you mean {' or '.join(same)}?"
    if path := _similar(tuple(above), wrong, here, elsewhere):
        return f"; did you mean {'.'.join(path)}?"
    return f"; allowed here: {', '.join(sorted(here))}"


def _similar(above: Path, wrong: str, here: Sequence[str], elsewhere: Iterable[Path]) -> Path:
    """Return the path of a similar key: a slip of one letter before a loose likeness."""
    by_name = {path[-1]: path for path in elsewhere}
    beside = {name: (*above, name) for name in here}
    for paths, cutoff in ((beside, 0.85), (by_name, 0.85), (beside, 0.6)):
        if close := difflib.get_close_matches(wrong, paths, n=1, cutoff=cutoff):
            return paths[close[0]]
    return ()


def _repaired(
    error: ValidationError, tree: Tree, validated: Callable[[Tree], RunConfig]
) -> tuple[RunConfig, set[Path]]:
    """Take out what is at fault until the rest is well-formed; return it and what was taken."""
    repaired, taken_out, remaining = copy.deepcopy(tree), set[Path](), error
    while True:
        taken_out |= _take_out_all(remaining, repaired)
        try:
            return validated(repaired), taken_out
        except ValidationError as next_error:
            # Rules of a section are checked once its keys are right; each round takes one out.
            remaining = next_error


def _take_out_all(error: ValidationError, tree: Tree) -> set[Path]:
    gone: set[Path] = set()
    for detail in error.errors(include_url=False):
        path = place_of(detail["loc"]).path
        # What is below a section that went already went with it.
        if all(path[: len(above)] != above for above in gone):
            gone.add(_take_out(path, tree))
    return gone


def _take_out(path: Path, tree: Tree) -> Path:
    """Remove what is at ``path``, or replace it if required; return its path."""
    for required, stand_in in _REQUIRED.items():
        shared = min(len(path), len(required))
        if path[:shared] == required[:shared]:
            _put(tree, required, stand_in)
            return path[: len(required)]
    # Where a key is missing its section goes, so that every round takes out something.
    while not _value_at(path, tree)[1]:
        path = path[:-1]
    node, _ = _value_at(path[:-1], tree)
    assert isinstance(node, dict), f"{path} was found in a table"
    del node[path[-1]]
    return path


def _put(tree: Tree, path: Path, value: object) -> None:
    node = tree
    for part in path[:-1]:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[path[-1]] = value
