"""Who may call, from where and with how much: keys, Host, Origin, body size, request ids, and the access line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.server.hosts import Neighbourhood, is_loopback
from expertd.server.keys import KeyRing
from expertd.server.settings import ServerSettings
from tests.server.conftest import ADMIN_KEY, LiveServer
from tests.server.doubles import Double

Start = Callable[..., LiveServer]
ASK = {"messages": [{"role": "user", "content": "Hello there, this is secret"}]}


def test_keys(start_server: Start) -> None:
    server = start_server(Double(), api_keys=("alpha", "beta"))
    with server.client() as http:
        for path in ("/health", "/v1/health", "/livez", "/readyz"):
            assert http.get(path).status_code == 200, path
        for path in ("/v1/models", "/metrics", "/expertd/cache", "/openapi.json", "/slots", "/nowhere"):
            refused = http.get(path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert refused.json()["error"]["type"] == "authentication_error"
        for headers in (
            {"Authorization": "Bearer alpha"},
            {"authorization": "bearer  beta"},
            {"X-Api-Key": "beta"},
            {"X-Api-Key": ADMIN_KEY},
        ):
            assert http.get("/v1/models", headers=headers).status_code == 200, headers
        for key in ("alph", "alphaa", "", "Alpha", "ALPHA\u00e9"):
            assert http.get("/v1/models", headers={"X-Api-Key": key.encode("latin-1")}).status_code == 401
        message = http.post("/v1/messages", json={}, headers={"X-Api-Key": "wrong"})
        assert message.status_code == 401
        assert message.json()["type"] == "error"
        assert message.json()["error"]["type"] == "authentication_error"
    with server.local() as http:
        assert http.get("/v1/models").status_code == 200, "the unix socket needs no key"
    server.call(lambda: server.app.state.context.keys.replace(["gamma"], ""))
    with server.client() as http:
        assert http.get("/v1/models", headers={"X-Api-Key": "alpha"}).status_code == 401
        assert http.get("/v1/models", headers={"X-Api-Key": "gamma"}).status_code == 200


@given(keys=st.lists(st.text(min_size=1), max_size=4), tried=st.text())
def test_a_key_ring_admits_its_keys_alone(keys: list[str], tried: str) -> None:
    ring = KeyRing(keys, "admin")
    assert ring.admits(tried) == (tried in keys or tried == "admin")
    assert all(ring.admits(k) for k in keys)
    assert ring.admits_admin(tried) == (tried == "admin")
    assert not ring.admits(None)
    assert ring.required == bool(keys)


def test_foreign_hosts_are_refused_on_loopback(start_server: Start) -> None:
    server = start_server(Double(), allowed_hosts=("box.lan",))
    with server.client() as http:
        for host in ("localhost", "127.0.0.1:8642", "[::1]:80", "LOCALHOST", "a.localhost", "box.lan", "BOX.LAN:1"):
            assert http.get("/livez", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8642", "10.0.0.1", ""):
            refused = http.get("/livez", headers={"host": host})
            assert refused.status_code == 403, host
            assert refused.json()["error"]["type"] == "permission_error"
    with server.local() as http:
        assert http.get("/livez", headers={"host": "anything"}).status_code == 200


def test_other_addresses_answer_any_host() -> None:
    assert Neighbourhood(ServerSettings(host="0.0.0.0")).host_allowed("models.example")
    assert not Neighbourhood(ServerSettings(host="::1")).host_allowed("models.example")
    assert is_loopback("127.3.2.1")
    assert not is_loopback("126.0.0.1")


def test_cors(start_server: Start) -> None:
    server = start_server(Double(), cors_origins=("https://ui.example",), api_keys=("k",))
    with server.client() as http:
        for origin in (
            "http://localhost:3000",
            "http://127.0.0.1",
            "https://[::1]:8",
            "https://ui.example",
            server.url,
        ):
            before = http.options(
                "/v1/chat/completions",
                headers={
                    "Origin": origin,
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization,content-type",
                },
            )
            assert before.status_code == 204, origin
            assert before.headers["access-control-allow-origin"] == origin
            assert before.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "access-control-allow-credentials" not in before.headers
            asked = http.post("/v1/chat/completions", json=ASK, headers={"Origin": origin, "X-Api-Key": "k"})
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == origin
            assert "origin" in asked.headers["vary"]
        for origin in (
            "https://evil.example",
            "null",
            "http://localhost.evil.example",
            "file://",
            "chrome-extension://x",
        ):
            refused = http.post("/v1/chat/completions", json=ASK, headers={"Origin": origin, "X-Api-Key": "k"})
            assert refused.status_code == 403, origin
            assert "access-control-allow-origin" not in refused.headers


def test_bodies_are_limited(start_server: Start) -> None:
    server = start_server(Double(), max_body_nbytes=100_000)
    big = b'{"messages": [{"role": "user", "content": "' + b"a" * 10_000_000 + b'"}]}'
    with server.client() as http:
        answer = http.post("/v1/chat/completions", content=big)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        chunked = http.post("/v1/chat/completions", content=iter([big[:60_000], big[60_000:200_000]]))
        assert chunked.status_code == 413
        assert http.post("/v1/messages", content=big).json()["error"]["type"] == "request_too_large"
        assert http.post("/v1/chat/completions", json=ASK).status_code == 200


def test_slow_bodies_are_given_up(start_server: Start) -> None:
    server = start_server(Double(), body_seconds=0.3)
    with server.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def test_slow_and_huge_heads_are_cut_off(start_server: Start) -> None:
    server = start_server(Double(), header_seconds=0.3)
    with server.connect() as sock:
        assert sock.recv(10) == b"", "a silent connection is closed"
    with server.connect() as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: local")
        assert sock.recv(10) == b""
    with server.connect() as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises((ConnectionError, AssertionError)):  # noqa: PT012
            for _ in range(200):
                sock.sendall(b"X-Filler: " + b"a" * 1000 + b"\r\n")
                time.sleep(0.001)
            assert sock.recv(10) != b""
    with server.client() as http:
        assert http.get("/livez").status_code == 200


def test_connections_are_limited(start_server: Start) -> None:
    server = start_server(Double(), max_connections=3)
    held = [server.connect() for _ in range(3)]
    for sock in held:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    with server.connect() as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012
            if sock.recv(10) == b"":
                raise ConnectionError
    for sock in held:
        sock.close()


def test_who_never_finishes_a_request_makes_room(start_server: Start) -> None:
    server = start_server(Double(), max_connections=3, header_seconds=60)
    beginnings = (b"", b"GET /li", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    opened = []
    for beginning in beginnings:
        opened.append(server.connect())
        opened[-1].sendall(beginning)
    with server.local() as http:
        assert http.get("/livez").status_code == 200, "the socket has room of its own"
    for longest_waiting in opened[: len(beginnings)]:
        with server.connect() as sock:
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        assert longest_waiting.recv(10) == b""
        opened.append(server.connect())
    for sock in opened:
        sock.close()


def test_request_ids(start_server: Start) -> None:
    server = start_server(Double())
    with server.client() as http:
        assert http.get("/livez", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        made = http.get("/livez", headers={"X-Request-Id": "with space"}).headers["x-request-id"]
        assert made.startswith("req_")
        assert http.get("/nowhere").headers["x-request-id"].startswith("req_")
        http.post("/v1/chat/completions", json=ASK, headers={"X-Request-Id": "mine-2"})
    assert server.service.requests[-1].request_id == "mine-2"


def test_one_line_a_request_and_never_a_prompt(start_server: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = start_server(Double(), api_keys=("top-secret-key",))
    with server.client(headers={"X-Api-Key": "top-secret-key"}) as http:
        http.post("/v1/chat/completions", json=ASK)
        http.post("/v1/chat/completions", json={**ASK, "stream": True})
        http.post("/v1/chat/completions", json={"messages": 1})
    lines = [r for r in caplog.records if r.name == "expertd.access"]
    assert [r.fields["status"] for r in lines] == [200, 200, 400]  # type: ignore[attr-defined]
    for record in lines[:2]:
        fields: dict[str, Any] = record.fields  # type: ignore[attr-defined]
        assert fields["prompt_tokens"] == 3
        assert fields["tokens"] == 2
        assert fields["hit_ratio"] == 0.75
        assert fields["bytes_read"] == 2
        assert fields["ttft_ms"] >= 0
        assert fields["finish"] == "stop"
        assert "hit_ratio=0.75" in record.getMessage()
    text = "\n".join(r.getMessage() for r in caplog.records)
    assert "secret" not in text
    assert server.app.state.context.counts == {("/v1/chat/completions", 200): 2, ("/v1/chat/completions", 400): 1}


def test_admin_verbs_need_the_socket_or_the_admin_key(start_server: Start) -> None:
    server = start_server(Double())
    for path in ("/expertd/warm", "/expertd/pin", "/expertd/unpin", "/expertd/evict"):
        with server.client() as http:
            refused = http.post(path, json={})
            assert refused.status_code == 403, path
            assert "admin key" in refused.json()["error"]["message"]
            wrong: httpx.Response = http.post(path, json={}, headers={"Authorization": "Bearer wrong"})
            assert wrong.status_code == 403
