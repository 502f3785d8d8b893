"""The faults of a recipe, worded for the person who wrote it.

Owns the promise that one attempt reports everything: settings that contradict each other are
found even where other keys are wrong, unless they rest on those. Decides nothing about validity.
"""

from __future__ import annotations

import copy
import datetime as dt
import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.config.run import RunConfig, contradictions
from headrace.config.schema import Place, all_keys, place_of, sections_in, tags

Tree = dict[str, Any]
Path = tuple[str, ...]

_REQUIRED: Mapping[Path, object] = {
    ("model",): {"path": "any"},
    ("data", "train"): {"type": "jsonl", "path": "any"},
    ("verifier",): {"components": {"any": {"kind": "exact"}}},
}
"""Stands in for a faulty required section while the other settings are compared."""

_MAX_SHOWN = 80
"""Characters of a wrong value that a message quotes."""


def unfit_values(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Yield a line for every TOML value that no key of a recipe can take: dates and times."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from unfit_values(value, f"{key}.")
        elif any(_is_time(item) for item in (value if isinstance(value, list) else [value])):
            yield f"{key} = {value}: dates and times are not used anywhere; write it in quotes"


def problems_in(
    error: ValidationError, tree: Tree, validated: Callable[[Tree], RunConfig]
) -> tuple[str, ...]:
    """Return a line for every fault of ``tree``, in its own order.

    ``validated`` tries a tree; it raises ValidationError where that has faults.
    """
    found = [(_order(place.path, tree), text) for place, text in _wrong_keys(error, tree)]
    for keys, text in _contradictory(error, tree, validated):
        found.append((min(_order(key, tree) for key in keys), text))
    # A list with two wrong entries is one line; dict.fromkeys keeps the order.
    return tuple(dict.fromkeys(text for _, text in sorted(found, key=lambda item: item[0])))


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
    text = json.dumps(value, ensure_ascii=False)
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


def _contradictory(
    error: ValidationError, tree: Tree, validated: Callable[[Tree], RunConfig]
) -> Iterator[tuple[Sequence[Path], str]]:
    """Compare the settings that are well-formed: those at fault are first taken out."""
    repaired, dropped = copy.deepcopy(tree), set[Path]()
    config, remaining = None, error
    while config is None:
        dropped |= {_take_out(detail, repaired) for detail in remaining.errors(include_url=False)}
        try:
            config = validated(repaired)
        except ValidationError as next_error:
            # Rules of a section are checked once its keys are right; each round takes one out.
            remaining = next_error
    for contradiction in contradictions(config):
        keys = [tuple(key.split(".")) for key in contradiction.keys]
        if not any(key[: len(path)] == path for key in keys for path in dropped):
            yield keys, contradiction.text


def _take_out(detail: ErrorDetails, tree: Tree) -> Path:
    """Remove what ``detail`` complains of, or replace it if required; return its path."""
    path = place_of(detail["loc"]).path
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
