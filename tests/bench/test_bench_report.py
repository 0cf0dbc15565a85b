from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from expertd.bench import plots, report
from expertd.bench.ab import Job
from expertd.bench.machine import describe
from expertd.bench.results import compare, summarise
from expertd.bench.spec import Arm, Cache, Kind, Prompt, Run
from expertd.errors import BenchError, UsageError
from expertd.model.gguf import read_model


class Page(HTMLParser):
    """Collects what a page would fetch, its ids and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)
            if name == "id" and value:
                self.ids.append(value)

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def document(demo_model: Path, make_run: Callable[..., Run]) -> dict[str, Any]:
    arms = (Arm("plain", Kind.PLAIN), Arm("steered", Kind.STEERED))
    job = Job(demo_model, arms, (Prompt("<b>", "say <script>alert(1)</script>"),), runs=2, memory_bytes=1 << 30)
    cache = Cache(requests=10, hits=9, splits=3, tap_seconds=0.1, budget_bytes=1 << 20, choice="steering is on: as set")
    comparison = compare(
        [
            summarise(arms[0], [make_run(gap=0.5), make_run(gap=0.6, stalled=5.0, finished=False)]),
            summarise(arms[1], [make_run("steered", gap=0.1, cache=cache)] * 2),
        ]
    )
    here = describe(demo_model)
    return report.ab_document(
        job, read_model(demo_model), comparison, here, command=["expertd", "bench"], notes=["A note."]
    )


def test_the_page_stands_by_itself(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    report.write_ab(path, document)
    text = path.read_text()
    page = Page(text)
    assert page.fetched == []
    assert "script" not in page.tags, "what a user wrote is text on the page"
    assert not re.search(r"url\((?!#)", text)
    assert page.tags.count("svg") == 7
    assert len(page.ids) == len(set(page.ids)), "plots share one document"
    words = " ".join(page.words.split())
    for expected in (
        "Tiny MoE",
        "steered decodes at least",
        "(a bound:",
        "A note.",
        "steering is on: as set",
        "same output",
    ):
        assert expected in words


def test_differences_are_not_hidden(document: dict[str, Any], tmp_path: Path) -> None:
    document["same_output"] = False
    document["difference"] = {"arm": "steered", "run": 1, "prompt": 0, "token": 7}
    report.write_ab(tmp_path / "r.html", document)
    assert "The outputs differ: arm steered, run 1" in " ".join(Page((tmp_path / "r.html").read_text()).words.split())


def test_the_http_page(tmp_path: Path) -> None:
    spread = {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
    document = report.http_document(
        {
            "url": "http://127.0.0.1:1", "model": "m<i>", "api": "chat", "requests": 2, "concurrency": 1,
            "completed": 1, "failed": 1, "errors": {"status 503: busy": 1},
            "tokens_counted_by": "usage", "ttft_seconds": spread,
            "inter_token_seconds": None, "prompt_tokens_per_second": None, "decode_tokens_per_second": 5.0,
            "total_tokens_per_second": 5.0, "server_prompt_per_second": None, "server_predicted_per_second": None,
            "answers": [{"error": "", "ttft_seconds": 1.0, "gaps": []}, {"error": "x"}],
        },
        ["expertd", "bench", "http"],
    )  # fmt: skip
    report.write_http(tmp_path / "h.html", document)
    page = Page((tmp_path / "h.html").read_text())
    assert page.fetched == []
    assert "1 failed: status 503: busy" in page.words
    assert "m<i>" in page.words


def test_a_report_that_cannot_be_written_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="there is no directory"):
        report.check_target(tmp_path / "absent" / "r.html")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match="needs matplotlib"):
        plots.check_available()


def test_numbers() -> None:
    assert [report.number(v) for v in (None, 0.12345, 12.345, 12345.6)] == ["–", "0.123", "12.3", "12,346"]
