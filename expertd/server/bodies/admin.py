"""Bodies of the verbs that change the expert cache and its profiles. Sizes are bytes or texts such as 20GiB."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]


class SelectionBody(msgspec.Struct, kw_only=True):
    """Which experts: of a profile, of layers (`0-3,7`), the hottest share of these (`25%` or 0.25), or single ones
    (`3:17`, `3:0-15`). `all` says that no choice is meant."""

    profile: Name | None = None
    layers: Text | None = None
    share: float | str | None = None
    experts: Annotated[list[Text], Meta(max_length=4096)] | None = None
    all: bool | None = None


class WarmBody(msgspec.Struct, kw_only=True):
    """`level` is dense, profile (the default) or all; without a profile the default one's experts are warmed."""

    level: Literal["dense", "profile", "all"] = "profile"
    profile: Name | None = None
    budget: Annotated[int, Meta(ge=0)] | Text | None = None
    pin: bool | None = None
    stream: bool | None = None


class RehearsalBody(msgspec.Struct, kw_only=True):
    """Prompts to run, learn, warm and run again. Targets are for every prompt."""

    prompts: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=256)]
    profile: Name = "demo"
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    target_tps: Annotated[float, Meta(gt=0)] | None = None
    target_ttft_seconds: Annotated[float, Meta(gt=0)] | None = None
    pin: bool | None = None
    add: bool | None = None
    stream: bool | None = None


class MergeBody(msgspec.Struct, kw_only=True):
    profiles: Annotated[list[Name], Meta(min_length=1, max_length=256)]
    into: Name


class RenameBody(msgspec.Struct, kw_only=True):
    to: Name


class TraceBody(msgspec.Struct, kw_only=True):
    """`max_bytes` bounds the file; the configuration's bound where it is not given."""

    max_bytes: Annotated[int, Meta(ge=4096)] | None = None
