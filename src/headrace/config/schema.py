"""What a recipe may hold, read off the sections' own types.

The one place that knows how pydantic writes unions, so that a message can name the key as the
user wrote it and say in plain words what is allowed there. Judges no value.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.run import RunConfig

NAME = "NAME"
"""Stands in a key for a name the user chooses, such as that of a verifier's component."""

SectionType = type[BaseModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a recipe something is, and what belongs there."""

    path: tuple[str, ...] = ()
    """The key as the user writes it: no union tags, and no positions inside a list."""
    annotation: object = RunConfig
    """Type of what stands there; None for a key that does not exist."""
    section: SectionType | None = None
    """The section that the last key is in; None where that is a user's own table."""
    rivals: tuple[SectionType, ...] = ()
    """Sections that could have stood in place of ``section``, had the kind been another."""
    allowed: str = "a table"
    """What the value must be, in words; empty for a key that does not exist."""

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)


def place_of(location: Sequence[int | str]) -> Place:
    """Follow a pydantic error location from the root of `RunConfig`."""
    place = Place()
    for part in location:
        place = _step(place, str(part))
    return place


def _step(place: Place, part: str) -> Place:
    """Return the place one part of a location further down."""
    if _is_table(place.annotation):
        element = get_args(place.annotation)[-1]
        return Place(path=(*place.path, part), annotation=element)
    members = sections_in(place.annotation)
    if not members:
        return place  # inside a list: the list as a whole is what the user has to look at
    if len(members) > 1:
        chosen = next(member for member in members if _tag(member) == part)
        rivals = tuple(member for member in members if member is not chosen)
        return replace(place, annotation=chosen, rivals=rivals)
    field = members[0].model_fields.get(part)
    return Place(
        path=(*place.path, part),
        annotation=field.annotation if field else None,
        section=members[0],
        rivals=place.rivals,
        allowed=_describe(field.annotation, field.metadata) if field else "",
    )


def all_keys(section: SectionType, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key below ``section``, `NAME` standing for a user's own names.

    A union counts with all its members, so a path may come more than once.
    """
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield path
        below = (*path, NAME) if _is_table(field.annotation) else path
        for member in sections_in(field.annotation):
            yield from all_keys(member, below)


def sections_in(annotation: object) -> tuple[SectionType, ...]:
    """Return the section types an annotation is made of; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(found for argument in get_args(annotation) for found in sections_in(argument))


def tags(members: Sequence[SectionType]) -> str:
    """Return the allowed values of the field that tells ``members`` apart."""
    return ", ".join(f'"{_tag(member)}"' for member in members)


def _tag(member: SectionType) -> str:
    """Return the one value of the discriminator: the first field of type Literal."""
    choices = (get_args(field.annotation) for field in member.model_fields.values())
    return next(str(choice[0]) for choice in choices if len(choice) == 1)


def _is_table(annotation: object) -> bool:
    return get_origin(annotation) is dict


_PLAIN: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Path: "text in quotes",
}


def _describe(annotation: object, metadata: Sequence[object]) -> str:
    """Say what a value must be: its type, its range, and null where that is allowed."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], (*metadata, *arguments[1:]))
    if origin in {Union, types.UnionType}:
        return _describe_union(arguments, metadata)
    if origin is Literal:
        choices = ", ".join(f'"{choice}"' for choice in arguments)
        return f"one of {choices}" if len(arguments) > 1 else choices
    if origin is tuple:
        return _describe_tuple(arguments) + "".join(_bound(limit) for limit in metadata)
    words = _PLAIN.get(annotation) or _describe_table(annotation)
    return words + "".join(_bound(limit) for limit in metadata)


def _describe_table(annotation: object) -> str:
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "a table"
    needed = [name for name, field in annotation.model_fields.items() if field.is_required()]
    return "a table" + (f" with {' and '.join(needed)}" if needed else "")


def _describe_union(arguments: Sequence[object], metadata: Sequence[object]) -> str:
    values = [argument for argument in arguments if argument is not type(None)]
    words = "a table" if len(values) > 1 else _describe(values[0], metadata)
    return words if len(values) == len(arguments) else f"{words}, or null"


def _describe_tuple(arguments: Sequence[object]) -> str:
    plural: dict[object, str] = {int: "whole numbers", float: "numbers", str: "texts in quotes"}
    element, limits = arguments[0], ""
    if get_origin(element) is Annotated:
        element, *metadata = get_args(element)
        limits = "".join(_bound(limit) for limit in _limits(metadata)).replace(",", ", each", 1)
    kind = plural.get(element) or f"texts in quotes, each {_describe(element, ())}"
    number = "" if arguments[-1] is ... else f"{len(arguments)} "
    return f"a list of {number}{kind}{limits}"


def _limits(metadata: Sequence[object]) -> Iterator[object]:
    """Yield the limits in ``metadata``; pydantic keeps those of a `Field` inside it."""
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _bound(limit: object) -> str:
    match limit:
        case Ge(ge=value):
            return f", at least {value:g}"
        case Gt(gt=value):
            return f", above {value:g}"
        case Le(le=value):
            return f", at most {value:g}"
        case Lt(lt=value):
            return f", below {value:g}"
        case MinLen():
            return ", not empty"
        case _:
            return ""
