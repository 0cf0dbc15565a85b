"""The OpenAPI document, and schemathesis over all that it describes: no 5xx, no hang, answers as they are described.

Random bodies go to the real model; the boundaries of every field, which are many, to a double of it (as far as it does
what the model does).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from expertd.runtime.service import Service
from expertd.server.openapi import document
from expertd.server.routes.table import OPERATIONS
from tests.server.conftest import LiveServer, runtime_settings, server_settings
from tests.server.doubles import Double

WATCHED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
APART = ["/expertd/events", "/v1/embeddings"]
"""A stream without an end, and an endpoint that answers 501 and means it."""


def described(**phases: bool) -> Any:
    config = SchemathesisConfig.from_dict(
        {"phases": {name: {"enabled": enabled} for name, enabled in phases.items()}, "seed": 1}
    )
    return schemathesis.openapi.from_dict(document(OPERATIONS), config=config).exclude(path=APART)


def patient(max_examples: int) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=checks)


@pytest.fixture(scope="module")
def real(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    service = Service(runtime_settings(demo_model))
    made = LiveServer(service, server_settings(tmp_path_factory.mktemp("openapi"), max_tokens=2)).start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    made = LiveServer(Double(), server_settings(tmp_path_factory.mktemp("double"))).start()
    yield made
    made.stop()


@described(coverage=False).parametrize()
@patient(8)
def test_random_requests(real: LiveServer, case: Any) -> None:
    case.validate_response(case.call(base_url=real.url, timeout=30), checks=WATCHED)


@described(fuzzing=False).exclude(path_regex="^/expertd/").parametrize()
@patient(1)
def test_boundaries_of_every_field(double: LiveServer, case: Any) -> None:
    case.validate_response(case.call(base_url=double.url, timeout=30), checks=WATCHED)


def test_the_document_names_every_endpoint() -> None:
    made = document(OPERATIONS)
    assert made["openapi"].startswith("3.1")
    for operation in OPERATIONS:
        if not operation.hidden:
            assert operation.method.lower() in made["paths"][operation.path]
    chat = made["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) >= {"200", "400", "401", "413", "429", "503"}
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    body = made["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["messages"]
    assert {"temperature", "dry_multiplier", "response_format", "tools"} <= body["properties"].keys()


def test_the_document_names_what_the_code_reads_from_an_address() -> None:
    """Of every endpoint, not of those two alone: the names are taken from the source of its function."""
    for operation in OPERATIONS:
        source = inspect.getsource(operation.endpoint)
        read = set(re.findall(r'_number\(request, "(\w+)"\)', source))
        for names in re.findall(r"_number\(request, name\) for name in \(([^)]*)\)", source):
            read |= set(re.findall(r'"(\w+)"', names))
        assert read == {q.name for q in operation.query}, operation.path
        assert not operation.query or 400 in operation.errors
    made = document(OPERATIONS)["paths"]
    assert [p["name"] for p in made["/expertd/experts"]["get"]["parameters"]] == ["layer", "expert", "limit"]
    assert [(p["name"], p["in"]) for p in made["/expertd/series"]["get"]["parameters"]] == [("since", "query")]


def test_numbers_in_an_address_are_what_the_document_says(real: LiveServer) -> None:
    with real.client() as http:
        for operation in OPERATIONS:
            for query in operation.query:
                for value, status in (("0", 200), (str(10**18 - 1), 200), (str(10**18), 400), ("-1", 400), ("x", 400)):
                    got = http.get(operation.path, params={query.name: value})
                    assert got.status_code == status, (operation.path, query.name, value)
