"""Field types that the catalogue's models share."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, Field


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"is not a requirement ({error})") from None
    return text


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError("is not a version specifier, such as ==0.6.3") from None
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return text


def _canonical(text: str) -> str:
    if canonicalize_name(text) != text:
        raise ValueError(f"is not the canonical name of a distribution: write {canonicalize_name(text)}")
    return text


@cache
def requirement_covers(requirement: str, pin: str) -> bool:
    """Whether a requirement ("sglang>=0.5.9,<0.5.13") holds for a pin ("sglang==0.5.9")."""
    wanted, name, version = Requirement(requirement), *pin.split("==")
    return wanted.name == name and wanted.specifier.contains(version, prereleases=True)


RequirementText = Annotated[str, AfterValidator(_requirement)]
SpecifierText = Annotated[str, AfterValidator(_specifier)]
RegexText = Annotated[str, AfterValidator(_regex)]
DistributionName = Annotated[str, AfterValidator(_canonical)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
