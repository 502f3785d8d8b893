"""`headrace doctor`."""

from __future__ import annotations

import json

import typer

from headrace.cli.options import AsJson


def doctor(*, as_json: AsJson = False) -> None:
    """Say what this machine has, what is missing, and how to get it."""
    from headrace.runtime.diagnosis import diagnose

    findings = diagnose()
    if as_json:
        typer.echo(json.dumps({finding.name: finding.to_json() for finding in findings}))
        return
    for finding in findings:
        mark = "ok     " if finding.present else "missing"
        typer.echo(f"{mark}  {finding.name:22} {finding.detail}")
        if finding.remedy:
            typer.echo(f"{'':33}{finding.remedy}")
