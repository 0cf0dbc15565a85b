"""The shipped rules, alerts and dashboard: they parse, name only metrics that exist, and each alert fires.

Uses promtool of Debian's package prometheus. That the expressions give data on a running daemon is shown by
`test_prometheus_live.py`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from expertd.telemetry.metrics import METRICS

CONFIG = Path(__file__).resolve().parents[2] / "config"
RULES, ALERTS = CONFIG / "prometheus" / "rules.yml", CONFIG / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((CONFIG / "grafana" / "expertd.json").read_text())
INSTANCE = {"instance": "box:8642", "job": "expertd"}


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_rules_alerts_and_scrape_job_parse() -> None:
    promtool("check", "rules", str(RULES), str(ALERTS))
    promtool("check", "config", str(CONFIG / "prometheus" / "scrape.yml"))


def test_the_dashboards_expressions_parse(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{i}", "expr": expr.replace("$instance", ".*")}
        for i, expr in enumerate(dashboard_expressions())
    ]
    file = tmp_path / "panels.json"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_only_metrics_that_exist_are_used() -> None:
    exported = {m.name for m in METRICS}
    for metric in METRICS:
        if metric.kind == "histogram":
            exported |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    text = RULES.read_text() + ALERTS.read_text()
    recorded = set(re.findall(r"record: (\S+)", text))
    expressions = re.findall(r"expr: (?:>-\n)?((?:.+\n)+?)\s+(?:- |for:|labels:|#|$)", text) + dashboard_expressions()
    used = {name for expr in expressions for name in re.findall(r"\bexpertd[_:][a-z0-9_:]+", expr)}
    assert used <= exported | recorded
    assert recorded <= used | {"expertd:over_read:rate5m"} | set(
        re.findall(r"expertd:[a-z0-9_:]+", str(DASHBOARD) + text)
    )


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inner = ",".join(f'{key}="{value}"' for key, value in (INSTANCE | labels).items())
    return {"series": f"{name}{{{inner}}}", "values": values}


_HITS = [
    series("expertd_cache_requests_total", "0+500x60", result="hit"),
    series("expertd_cache_requests_total", "0+500x60", result="miss"),
    series("expertd_cache_prompt_requests_total", "0+375x60", result="hit"),
    series("expertd_cache_prompt_requests_total", "0+125x60", result="miss"),
]
# Alert: the series that make it fire, minutes until then, labels that it adds to the instance's.
FIRING: dict[str, tuple[list[dict[str, str]], int, dict[str, str]]] = {
    "ExpertdDown": ([series("up", "0x60")], 5, {}),
    "ExpertdNotReady": ([series("expertd_ready", "0x60")], 15, {}),
    "ExpertdRestarting": ([series("process_start_time_seconds", "0+100x60")], 10, {}),
    "ExpertdThrashing": ([series("expertd_thrashing", "1x60")], 15, {}),
    "ExpertdKernelTakesExperts": (
        [series("expertd_cache_evictions_total", "0+120x60", cause="dropped")],
        25,
        {"cause": "dropped"},
    ),
    "ExpertdHitRatioLow": ([*_HITS, series("expertd_generated_tokens_total", "0+60x60")], 30, {"job": ""}),
    "ExpertdSlowFirstToken": (
        [
            series("expertd_time_to_first_token_seconds_bucket", "0+1x60", le="60"),
            series("expertd_time_to_first_token_seconds_bucket", "0+9x60", le="120"),
            series("expertd_time_to_first_token_seconds_bucket", "0+9x60", le="+Inf"),
        ],
        25,
        {"job": ""},
    ),
    "ExpertdQueueFull": (
        [series("expertd_http_requests_total", "0+1x60", route="/v1/chat/completions", code="429")],
        15,
        {"route": "/v1/chat/completions", "code": "429"},
    ),
    "ExpertdReadErrors": ([series("expertd_io_errors_total", "0x5 1x60", op="read")], 8, {"op": "read"}),
    "ExpertdPinsFail": ([series("expertd_pin_failures_total", "0x5 3x60", reason="limit")], 8, {"reason": "limit"}),
    "ExpertdRoutesDropped": ([series("expertd_routes_dropped_total", "0x5 2x60")], 8, {}),
}
HEALTHY = [
    series("up", "1x60"),
    series("expertd_ready", "1x60"),
    series("process_start_time_seconds", "100x60"),
    series("expertd_thrashing", "0x60"),
    series("expertd_cache_evictions_total", "0+900x60", cause="route"),
    series("expertd_cache_evictions_total", "0x60", cause="dropped"),
    series("expertd_cache_requests_total", "0+900x60", result="hit"),
    series("expertd_cache_requests_total", "0+100x60", result="miss"),
    series("expertd_cache_prompt_requests_total", "0x60", result="hit"),
    series("expertd_cache_prompt_requests_total", "0x60", result="miss"),
    series("expertd_generated_tokens_total", "0+60x60"),
    series("expertd_time_to_first_token_seconds_bucket", "0+9x60", le="60"),
    series("expertd_time_to_first_token_seconds_bucket", "0+9x60", le="+Inf"),
    series("expertd_http_requests_total", "0+9x60", route="/v1/chat/completions", code="200"),
    series("expertd_io_errors_total", "0x60", op="read"),
    series("expertd_pin_failures_total", "0x60", reason="limit"),
    series("expertd_routes_dropped_total", "0x60"),
]


def shipped_alerts() -> dict[str, str]:
    """Name and severity, in the file's order."""
    return dict(re.findall(r"alert: (\w+)\n(?:.*\n)*?\s+labels: \{severity: (\w+)\}", ALERTS.read_text()))


def test_every_alert_fires_and_none_when_all_is_well(tmp_path: Path) -> None:
    assert set(shipped_alerts()) == set(FIRING)
    tests: list[dict[str, Any]] = [
        {
            "interval": "1m",
            "input_series": HEALTHY,
            "alert_rule_test": [
                {"eval_time": f"{m}m", "alertname": a, "exp_alerts": []} for a in FIRING for m in (10, 50)
            ],
        }
    ]
    for alert, (input_series, minutes, labels) in FIRING.items():
        expected = {k: v for k, v in (INSTANCE | labels | {"severity": shipped_alerts()[alert]}).items() if v}
        tests.append(
            {
                "interval": "1m",
                "input_series": input_series,
                "alert_rule_test": [
                    {"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": [{"exp_labels": expected}]}
                ],
            }
        )
    annotate(tests)
    file = tmp_path / "alerts_test.json"
    file.write_text(json.dumps({"rule_files": [str(RULES), str(ALERTS)], "tests": tests}))
    promtool("test", "rules", str(file))


def annotate(tests: list[dict[str, Any]]) -> None:
    """promtool compares annotations too: what the templates give for the series above."""
    values = {"ExpertdHitRatioLow": "25%", "ExpertdSlowFirstToken": "1m 56s"}
    found = re.findall(r"alert: (\w+)\n(?:.*\n)*?\s+summary: \"(.*)\"\n\s+description: \"(.*)\"\n", ALERTS.read_text())
    texts = {name: (summary, description) for name, summary, description in found}
    for case in tests[1:]:
        (rule,) = case["alert_rule_test"]
        labels = rule["exp_alerts"][0]["exp_labels"]
        summary, description = texts[rule["alertname"]]
        summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m, labels=labels: labels[m[1]], summary)
        summary = re.sub(r"\{\{ \$value \| \w+ \}\}", values.get(rule["alertname"], ""), summary)
        rule["exp_alerts"][0]["exp_annotations"] = {"summary": summary, "description": description.replace('\\"', '"')}


def test_ratios_are_right(tmp_path: Path) -> None:
    inputs = [
        *_HITS,
        series("expertd_generated_tokens_total", "0+60x60"),
        series("expertd_inter_token_seconds_count", "0+60x60"),
        series("expertd_inter_token_seconds_sum", "0+12x60"),
        series("expertd_disk_read_bytes_total", "0+6000x60"),
        series("expertd_page_faults_total", "0+30x60", kind="major"),
    ]
    expected = {
        "expertd:decode_hit_ratio:rate5m": 0.25,
        "expertd:hit_ratio:rate5m": 0.5,
        "expertd:decode_tokens_per_second:rate1m": 5,
        "expertd:read_bytes_per_token:rate5m": 100,
        "expertd:major_faults_per_token:rate5m": 0.5,
    }
    cases = [
        {
            "expr": f"round({name}, 0.001)",
            "eval_time": "20m",
            "exp_samples": [{"labels": '{instance="box:8642"}', "value": value}],
        }
        for name, value in expected.items()
    ]
    file = tmp_path / "ratios_test.json"
    test = {"interval": "30s", "input_series": inputs, "promql_expr_test": cases}
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [test]}))
    promtool("test", "rules", str(file))


def test_the_dashboard_is_laid_out_and_every_panel_says_what_it_shows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["description"].endswith(".")
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
