"""Whether a judge's endpoint answers before the run asks it anything.

Asks for the list of models, which costs nothing. An endpoint may be started later than the check,
or have no such list, so nothing that is found here is more than a note.
"""

from __future__ import annotations

import httpx2

from headrace.config.judge import EndpointSection

SECONDS = 3.0
"""For the whole question."""


def why_unreachable(config: EndpointSection, api_key: str | None) -> str | None:
    """Return why questions would not be answered now, or None where nothing speaks against it."""
    where = f"{config.url}/models"
    try:
        response = httpx2.get(
            where,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=SECONDS,
            follow_redirects=False,
            verify=config.url.startswith("https:"),
            trust_env=False,
        )
    except httpx2.LocalProtocolError:
        return None  # the key is at fault, which is told without quoting it
    except httpx2.RequestError as error:
        return f"{where} does not answer now ({type(error).__name__}): start it before the run"
    if response.status_code in {401, 403}:
        return f"{where} refuses the key, or wants one (HTTP {response.status_code})"
    if response.status_code != httpx2.codes.OK:
        return None
    names = _names(response)
    if names is None or config.model in names:
        return None
    return (
        f'{where} does not list model = "{config.model}"; it has {", ".join(names[:10]) or "none"}'
    )


def _names(response: httpx2.Response) -> list[str] | None:
    """Return the models that are served; None where the answer is of another form."""
    try:
        return [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, LookupError, TypeError):
        return None
