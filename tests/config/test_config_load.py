"""Sources, their order, their origins, and what is said of a fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.config import Config, load_config, read_keys, resolve_budget, sockets_to_try
from expertd.config.values import check, from_text, settings
from expertd.errors import ConfigError
from expertd.runtime.requests import Sampling


def load(
    tmp_path: Path, text: str = "", env: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> Config:
    file = tmp_path / "expertd.toml"
    file.write_text(text)
    return load_config(file, env or {}, flags or {})


def refusal(
    tmp_path: Path, text: str = "", env: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, env, flags)
    line = caught.value.line()
    assert "\n" not in line
    return line.replace(str(tmp_path), "DIR")


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    text = '[cache]\nbudget = "1GiB"\nreserve = "2GiB"\nlock_dense = false\n'
    env = {"EXPERTD_CACHE_BUDGET": "3GiB", "EXPERTD_CACHE_RESERVE": "4GiB"}
    config = load(tmp_path, text, env, {"cache.budget": "5GiB", "model.path": None})
    assert (config.cache.budget, config.origin("cache.budget")) == (5 << 30, "flag --budget")
    assert (config.cache.reserve, config.origin("cache.reserve")) == (4 << 30, "environment EXPERTD_CACHE_RESERVE")
    assert (config.cache.lock_dense, config.origin("cache.lock_dense")) == (False, f"{tmp_path}/expertd.toml:4")
    assert config.origin("model.path") == "default"
    with pytest.raises(KeyError):
        config.origin("cache.nothing")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cache]\nbuget = 3", "DIR/expertd.toml:2: cache.buget: unknown key; did you mean cache.budget?"),
        ("\n[cahce]\nbudget = 3", "DIR/expertd.toml:2: cahce: unknown section; did you mean [cache]?"),
        ("budget = 3", "DIR/expertd.toml:1: budget: unknown key; did you mean cache.budget?"),
        ("[cache]\nport = 3", "DIR/expertd.toml:2: cache.port: unknown key; did you mean server.port?"),
        ("cache = 3", "DIR/expertd.toml:1: cache is a section; write [cache] and its keys below"),
        (
            "server.port = 65536",
            "DIR/expertd.toml:1: server.port: 65536 is not allowed; write a whole number, 0 to 65535",
        ),
        (
            "[cache]\nsteering = true",
            "DIR/expertd.toml:2: cache.steering: true is not allowed; write one of auto, on, off",
        ),
        (
            "[engine]\nthreads = 2.5",
            "DIR/expertd.toml:2: engine.threads: 2.5 is not allowed; write a whole number, 0 to 4096",
        ),
        (
            '[engine]\noverride_tensor = ["exps"]',
            "DIR/expertd.toml:2: engine.override_tensor: ['exps'] is not allowed ('exps' is not pattern=buffer); "
            'write a list of "pattern=buffer"',
        ),
        (
            '[server]\ntls_key = "k.pem"',
            "DIR/expertd.toml:2: server.tls_key is set without server.tls_certificate; set both or none",
        ),
        (
            "[cache\n",
            "DIR/expertd.toml: not TOML: Expected ']' at the end of a table declaration (at line 1, column 7)",
        ),
    ],
)
def test_a_fault_in_the_file_is_one_line_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    assert refusal(tmp_path, text) == said


@pytest.mark.parametrize("budget", ['"12 parsecs"', '"0%"', '"101%"', "-1", "1.5", "true", '"-3GiB"', "[1]", '""'])
def test_a_budget_is_auto_bytes_a_size_or_a_share(tmp_path: Path, budget: str) -> None:
    said = refusal(tmp_path, f"[cache]\nbudget = {budget}")
    assert said.startswith("DIR/expertd.toml:2: cache.budget: ")
    assert said.endswith("; write auto, bytes, a size: 20GiB, or a share: 25%")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"[log]\n# caf\xe9\n")
    for path, said in (
        (tmp_path / "none.toml", "no such file (named by --config)"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "latin.toml", "not UTF-8 text at byte 11"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, {}, {})
        assert caught.value.line() == f"{path}: {said}"


def test_the_environment_is_checked_like_the_file(tmp_path: Path) -> None:
    said = refusal(tmp_path, env={"EXPERTD_CACHE_BUGET": "1"})
    assert said == "environment: EXPERTD_CACHE_BUGET: unknown key; did you mean EXPERTD_CACHE_BUDGET?"
    assert "did you mean EXPERTD_CACHE_BUDGET?" in refusal(tmp_path, env={"EXPERTD_CAHCE_BUDGET": "1"})
    said = refusal(tmp_path, env={"EXPERTD_SERVER_PORT": "http"})
    assert (
        said == 'environment EXPERTD_SERVER_PORT: server.port: "http" is not allowed; write a whole number, 0 to 65535'
    )
    assert refusal(tmp_path, env={"EXPERTD_CACHE_LOCK_DENSE": "maybe"}).endswith("write true or false")


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    links = {
        "EXPERTD_SERVICE_PORT": "80",
        "EXPERTD_PORT": "tcp://10.0.0.1:80",
        "EXPERTD_PORT_80_TCP": "x",
        "EXPERTD_FOO": "1",
        "EXPERTD_ADMIN_KEY": "secret",
    }
    assert dict(load(tmp_path, env=links).origins) == {}


def test_text_from_the_environment_becomes_the_type_of_the_key(tmp_path: Path) -> None:
    env = {
        "EXPERTD_CACHE_LOCK_DENSE": "off",
        "EXPERTD_SERVER_ALLOWED_HOSTS": "box.lan, 10.0.0.5",
        "EXPERTD_ENGINE_OVERRIDE_TENSOR": '["blk\\\\.[0-9]{1,2}=CPU"]',
        "EXPERTD_SERVER_DRAIN_SECONDS": "2m",
        "EXPERTD_SERVER_MAX_BODY": "1MiB",
        "EXPERTD_SERVER_SOCKET": "",
        "EXPERTD_SERVER_PORT": "",
    }
    config = load(tmp_path, "[server]\nport = 81", env)
    assert config.cache.lock_dense is False
    assert config.server.allowed_hosts == ["box.lan", "10.0.0.5"]
    assert config.engine.override_tensor == ["blk\\.[0-9]{1,2}=CPU"]
    assert (config.server.drain_seconds, config.server.max_body) == (120.0, 1 << 20)
    assert config.places.socket is None
    assert config.server.port == 81


def test_files_are_looked_for_in_order(tmp_path: Path) -> None:
    home, named = tmp_path / "xdg" / "expertd" / "expertd.toml", tmp_path / "named.toml"
    home.parent.mkdir(parents=True)
    home.write_text("[server]\nport = 1")
    named.write_text("[server]\nport = 2")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert load_config(None, env, {}).server.port == 1
    assert load_config(None, env | {"EXPERTD_CONFIG": str(named)}, {}).file == named
    assert load_config(home, env | {"EXPERTD_CONFIG": str(named)}, {}).server.port == 1
    with pytest.raises(ConfigError, match=r"gone.toml: no such file \(named by EXPERTD_CONFIG\)"):
        load_config(None, {"EXPERTD_CONFIG": str(tmp_path / "gone.toml")}, {})


def test_auto_places_follow_systemd_then_xdg(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "api-keys").write_text("k" * 32)
    unit = {
        "STATE_DIRECTORY": "/var/lib/expertd/big",
        "RUNTIME_DIRECTORY": "/run/expertd/big",
        "CREDENTIALS_DIRECTORY": str(credentials),
        "HOME": "/home/u",
    }
    found = load(tmp_path, env=unit).places
    assert (str(found.state_directory), str(found.socket)) == ("/var/lib/expertd/big", "/run/expertd/big/admin.sock")
    assert (found.api_keys_file, found.admin_key_file) == (credentials / "api-keys", None)
    person = {"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/home/u", "XDG_STATE_HOME": "relative"}
    found = load(tmp_path, env=person).places
    assert (str(found.state_directory), str(found.socket)) == (
        "/home/u/.local/state/expertd",
        "/run/user/7/expertd/admin.sock",
    )
    assert [str(p) for p in sockets_to_try(found.socket)] == [
        "/run/user/7/expertd/admin.sock",
        "/run/expertd/admin.sock",
    ]
    assert str(load(tmp_path).places.state_directory) == "/var/lib/expertd"


def test_sampling_names_and_defaults_are_the_runtimes(tmp_path: Path) -> None:
    assert load(tmp_path).sampling.sampling() == Sampling()
    text = "[sampling]\nseed = 7\nlogit_bias = [[5, -1.5]]\ntemperature = 0"
    assert load(tmp_path, text).sampling.sampling() == Sampling(seed=7, logit_bias=((5, -1.5),), temperature=0.0)


def test_changes_tell_a_reload_from_a_restart(tmp_path: Path) -> None:
    old = load(tmp_path)
    new = load(tmp_path, '[cache]\nbudget = "1GiB"\n[log]\nlevel = "debug"\n[server]\nport = 1')
    assert old.changes(new) == (["cache.budget", "log.level"], ["server.port"])
    assert old.changes(load(tmp_path)) == ([], [])


def test_shares_are_of_the_expert_bytes() -> None:
    assert resolve_budget("25%", 1000) == 250
    assert resolve_budget(7, 1000) == 7
    assert resolve_budget("auto", 1000) is None


def test_keys_are_read_and_never_repeated(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nabcdefghijklmnop\n\n  0123456789abcdef  \n")
    file.chmod(0o600)
    assert read_keys(file) == ("abcdefghijklmnop", "0123456789abcdef")
    for content, mode, said in (
        ("short-secret\n", 0o600, f"{file}:1: a key is 16 or more printable ASCII characters"),
        ("# none\n", 0o600, f"{file}: holds no key"),
        ("abcdefghijklmnop\n", 0o644, f"{file}: everyone may read these keys; chmod o-rwx {file}"),
    ):
        file.write_text(content)
        file.chmod(mode)
        with pytest.raises(ConfigError) as caught:
            read_keys(file)
        assert caught.value.line().startswith(said)
        assert "secret" not in caught.value.line()


@given(
    st.sampled_from(sorted(settings())),
    st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.booleans()),
)
def test_any_value_is_taken_or_refused_in_words(key: str, raw: object) -> None:
    setting = settings()[key]
    try:
        value = from_text(setting, raw) if isinstance(raw, str) else raw
        accepted = check(setting, value)
    except ValueError:
        return
    assert check(setting, accepted) == accepted


def test_flags_are_named_as_they_are_written(tmp_path: Path) -> None:
    config = load(tmp_path, flags={"engine.n_ctx": 512, "cache.half_life": "32", "warm.level": "none"})
    assert [config.origin(k) for k in ("engine.n_ctx", "cache.half_life", "warm.level")] == [
        "flag --ctx",
        "flag --set cache.half_life",
        "flag --warm",
    ]
