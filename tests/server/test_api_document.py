"""docs/api.md against the code: endpoints, fields, codes and settings that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from expertd.config.schema import SECTIONS
from expertd.server.bodies.openai import ChatBody, CompletionBody
from expertd.server.errors import STATUS
from expertd.server.routes.table import OPERATIONS
from expertd.server.settings import ServerSettings

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_endpoints() -> None:
    served = {path for o in OPERATIONS for path in (o.path, *o.also)} | {"/openapi.json", "/v1/models/{id}"}
    named = set(re.findall(r"`(?:GET |POST )?(/[^`\s]*)`", TEXT))
    assert named - served == set()
    shown = {o.path for o in OPERATIONS if o.path.startswith("/v1/") and not o.path.endswith("{model}")}
    assert shown - named == set()


def test_fields() -> None:
    known = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    text = section("Fields").split("\n### ", 1)[0]
    rows = re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    samplers = set(re.findall(r"`(\w+)`", text.split("All samplers", 1)[1].split("What a request", 1)[0]))
    assert (named | samplers) - known == set()
    assert {f for f in known if f.startswith(("dry_", "xtc_", "mirostat", "dynatemp", "repeat"))} <= samplers


def test_codes_and_settings() -> None:
    for line in section("Errors").splitlines():
        if found := re.match(r"\| ([\d, ]+) \| ([^|]*)\|", line):
            statuses = {int(n) for n in found[1].split(",")}
            assert {STATUS[code] for code in re.findall(r"`(\w+)`", found[2])} == statuses
    for part, key in re.findall(r"`(server|warm)\.(\w+)`", TEXT):
        assert key in SECTIONS[part].__struct_fields__, f"{part}.{key}"
    assert f"{ServerSettings().max_connections:,} connections" in TEXT
