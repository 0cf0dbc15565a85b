"""The shipped file and the verb say what the code says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from expertd.cli.config import command
from expertd.config import load_config
from expertd.config.document import template
from expertd.config.values import limits, settings
from expertd.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "config" / "expertd.toml"


def test_the_shipped_file_documents_every_key() -> None:
    assert SHIPPED.read_text() == template(), "run: expertd config template > config/expertd.toml"


@pytest.mark.parametrize("key", sorted(settings()))
def test_every_key_has_meaning_limits_and_default(key: str) -> None:
    setting = settings()[key]
    assert setting.meaning.endswith(".")
    assert limits(setting)
    body = SHIPPED.read_text().split(f"\n[{setting.section}]\n")[1].split("\n[")[0]
    comment = re.search(rf"((?:^# .*\n)+)#{setting.name} = ", body, re.MULTILINE)
    assert comment, f"{key} is not in the shipped file"
    said = " ".join(line.removeprefix("# ") for line in comment[1].splitlines())
    assert setting.meaning in said
    assert limits(setting) in said


def test_the_shipped_defaults_uncommented_change_nothing(tmp_path: Path) -> None:
    text = re.sub(r"^#(\w+ = )", r"\1", SHIPPED.read_text(), flags=re.MULTILINE)
    assert set(tomllib.loads(text)) == {s.section for s in settings().values()}
    file = tmp_path / "all.toml"
    file.write_text(text)
    spelled, implied = load_config(file, {}, {}), load_config(SHIPPED, {}, {})
    assert len(spelled.origins) == len(settings())
    assert spelled.changes(implied) == ([], [])


def test_show_prints_value_and_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[cache]\nbudget = "20GiB"\n')
    monkeypatch.setenv("EXPERTD_SERVER_PORT", "99")
    text = CliRunner().invoke(command, ["show", "--config", str(file)]).output
    assert re.search(rf'^cache\.budget +"20GiB" +{re.escape(str(file))}:2$', text, re.MULTILINE)
    assert re.search(r"^server\.port +99 +environment EXPERTD_SERVER_PORT$", text, re.MULTILINE)
    shown = json.loads(CliRunner().invoke(command, ["show", "--json", "--config", str(file)]).output)
    assert shown["settings"]["cache.budget"] == {"value": 20 << 30, "origin": f"{file}:2"}
    assert set(shown["settings"]) == set(settings())


def test_check_reads_the_key_files_and_prints_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-very-secret-key-of-ours\n")
    keys.chmod(0o600)
    file = tmp_path / "c.toml"
    file.write_text(f'[server]\napi_keys_file = "{keys}"\n')
    for verb in (["check"], ["show"], ["show", "--json"]):
        result = CliRunner().invoke(command, [*verb, "--config", str(file)])
        assert result.exit_code == 0
        assert "very-secret" not in result.output
    keys.chmod(0o644)
    assert isinstance(CliRunner().invoke(command, ["check", "--config", str(file)]).exception, ConfigError)
