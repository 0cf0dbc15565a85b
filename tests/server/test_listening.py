"""Listening: addresses in use, sockets that are stale or foreign, TLS, the unix socket, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from expertd.errors import ConfigError
from expertd.server.app import create_app
from expertd.server.run import HttpServer, ListenError
from expertd.server.settings import ServerSettings
from tests.server.conftest import LiveServer
from tests.server.doubles import Double

Start = Callable[..., LiveServer]


def server_for(settings: ServerSettings) -> HttpServer:
    return HttpServer(create_app(Double(), settings, bytes), settings)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError) as refused:
            server_for(ServerSettings(port=port)).bind()
    assert refused.value.message == f"127.0.0.1:{port} is in use"
    assert "--port" in refused.value.hint


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_named(host: str) -> None:
    with pytest.raises(ListenError) as refused:
        server_for(ServerSettings(host=host, port=0)).bind()
    assert host in refused.value.message


def test_ipv6() -> None:
    server = server_for(ServerSettings(host="::1", port=0))
    try:
        server.bind()
    except ListenError:
        pytest.skip("this machine has no IPv6 loopback")
    assert server.url == f"http://[::1]:{server.port}"


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "admin.sock"
    path.parent.mkdir()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    first = server_for(ServerSettings(port=0, socket_path=path))
    first.bind()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with pytest.raises(ListenError) as refused:
        server_for(ServerSettings(port=0, socket_path=path)).bind()
    assert "another expertd" in refused.value.message


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ListenError) as refused:
        server_for(ServerSettings(port=0, socket_path=path)).bind()
    assert str(path) in refused.value.message
    assert path.read_text() == "data"


def test_a_path_that_is_too_long_or_not_ours_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 200), Path("/proc/nothing/admin.sock")):
        with pytest.raises(ListenError) as refused:
            server_for(ServerSettings(port=0, socket_path=path)).bind()
        assert str(path) in refused.value.message


def test_the_socket_is_gone_after_the_end(start_server: Start) -> None:
    server = start_server(Double())
    path = server.settings.socket_path
    assert path is not None
    with server.local() as http:
        assert http.get("/health").json() == {"status": "ok"}
    server.stop()
    assert not path.exists()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    try:
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost",
                "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            ],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("needs the openssl command to make a certificate")
    return cert, key


def test_tls_on_tcp_and_plain_on_the_socket(start_server: Start, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = start_server(Double(), tls_certificate=cert, tls_key=key)
    assert server.url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=server.url, verify=trusted, timeout=20) as http:
        ask = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        assert "[DONE]" in http.post("/v1/chat/completions", json=ask).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")
    with server.local() as http:
        assert http.get("/health").status_code == 200


def test_bad_certificates_are_named(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for settings in (
        ServerSettings(port=0, tls_certificate=broken, tls_key=key),
        ServerSettings(port=0, tls_certificate=tmp_path / "missing.pem", tls_key=key),
        ServerSettings(port=0, tls_certificate=cert),
    ):
        with pytest.raises(ConfigError) as refused:
            asyncio.run(server_for(settings).serve())
        assert "tls" in refused.value.message or ".pem" in refused.value.message


def test_descriptors_do_not_pile_up(start_server: Start) -> None:
    server = start_server(Double())
    with server.client() as http:
        http.get("/livez")
    before = len(os.listdir("/proc/self/fd"))
    with server.client(limits=httpx.Limits(max_keepalive_connections=0)) as http:
        for _ in range(50):
            http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
    assert len(os.listdir("/proc/self/fd")) <= before + 3
