"""The commented configuration file that ships, written from the schema, so that the two cannot drift apart."""

from __future__ import annotations

import textwrap
from itertools import groupby

from expertd.config.schema import SECTIONS
from expertd.config.values import Setting, limits, settings, toml_text

_HEAD = """\
# Configuration of expertd. Every key, with its default, its limits and its meaning.
#
# Looked for: --config FILE, then $EXPERTD_CONFIG, then $XDG_CONFIG_HOME/expertd/expertd.toml, then
# /etc/expertd/expertd.toml; the first that is there is read. Over it go environment variables
# (EXPERTD_SECTION_KEY, for example EXPERTD_CACHE_BUDGET), over these the flags of `expertd serve`.
# `expertd config show` prints every value and where it came from; `expertd config check` only checks.
# A line that begins with # is the default. Keys marked "reload" follow `systemctl reload`; others need a restart.
"""


def template() -> str:
    """The file, all keys commented out."""
    parts = [_HEAD]
    for section, group in groupby(settings().values(), key=lambda s: s.section):
        doc = (SECTIONS[section].__doc__ or "").strip().splitlines()[0]
        parts.append(f"\n# {doc}\n[{section}]\n")
        parts.extend(_entry(setting) for setting in group)
    return "".join(parts)


def _entry(setting: Setting) -> str:
    notes = [limits(setting) + ("; reload" if setting.reload else "")]
    lines = [*textwrap.wrap(setting.meaning, 112), *textwrap.wrap(notes[0], 112)]
    comment = "".join(f"# {line}\n" for line in lines)
    return f"\n{comment}#{setting.name} = {toml_text(setting.default, setting)}\n"
