"""Addresses of servers that a recipe names."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator

_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
"""A name or an address, in lower case."""


def _server_url(url: str) -> str:
    """Return ``url`` as it is written for one server only in one way.

    Raises ValueError if it is none or names more than a server. What comes before an @ is a secret
    and has no place in a recipe.
    """
    msg = "give http://HOST:PORT or https://HOST:PORT and nothing after it"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        msg = f"{msg}; PORT is from 1 to 65535"
        raise ValueError(msg) from error
    beyond = parts.path not in {"", "/"} or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in {"http", "https"} or not _HOST.fullmatch(host) or port == 0 or beyond:
        raise ValueError(msg)
    where = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{where}" + ("" if port is None else f":{port}")


ServerUrl: TypeAlias = Annotated[str, AfterValidator(_server_url)]
"""Scheme, host and port of one server."""
