"""The OpenAPI document, and schemathesis over all that it describes: no 5xx, no hang, answers as they are described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from expertd.runtime.service import Service
from expertd.server.openapi import document
from expertd.server.routes.table import OPERATIONS
from tests.server.conftest import LiveServer, runtime_settings, server_settings

WATCHED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
HONEST = {"/v1/embeddings"}
"""Answers 501, and means it."""


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    service = Service(runtime_settings(demo_model))
    made = LiveServer(service, server_settings(tmp_path_factory.mktemp("openapi"), max_tokens=3)).start()
    yield made
    made.stop()


schema = schemathesis.openapi.from_dict(document(OPERATIONS)).exclude(path=["/expertd/events", *HONEST])


@schema.parametrize()
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
def test_whatever_is_sent(server: LiveServer, case: Any) -> None:
    answer = case.call(base_url=server.url, timeout=30)
    case.validate_response(answer, checks=WATCHED)


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
