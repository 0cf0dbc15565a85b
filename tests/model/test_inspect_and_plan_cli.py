"""`expertd inspect` and `expertd plan` as a user types them: tables, JSON, exit codes, memory, what they import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_gguf_bytes import TYPE_Q4_0, Tensor, moe_keys, moe_tensors, outer, write

from expertd.cli import run

GIB = 1 << 30


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def test_inspect_says_the_main_figures(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    text = out(capsys, "inspect", str(demo_model), "--layers", "--tensors")
    for words in ("Tiny MoE", "qwen3moe", "64 a layer, 4 used", "6.8 MiB", "13.5 KiB", "Q4_0 7.6 MiB"):
        assert words in text
    assert "gate 0: 1358752 + i x 4608" in text
    assert "blk.7.ffn_down_exps.weight" in text


def test_inspect_as_json(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    report = json.loads(out(capsys, "inspect", str(demo_model), "--json", "--layers", "--tensors"))
    assert report["files"] == [str(demo_model)]
    assert (report["tensors"], len(report["tensor_list"])) == (99, 99)
    assert (report["layers"], len(report["layer_list"])) == (8, 8)
    assert report["expert_bytes"] == 7077888
    plain = json.loads(out(capsys, "inspect", str(demo_model), "--json"))
    assert "tensor_list" not in plain


@pytest.mark.parametrize("verb", ["inspect", "plan"])
def test_a_bad_file_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03")
    for arguments in ([verb, str(path)], [verb, str(path), "--json"], [verb, str(tmp_path / "absent")]):
        assert run(arguments) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert shown.err.startswith(f"expertd: {arguments[1]}: ")


def test_wrong_usage_is_exit_2(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    for arguments in (["inspect"], ["plan", str(demo_model), "--ctx", "0"], ["plan", str(demo_model), "--ram", "lots"],
                      ["plan", str(demo_model), "--kv", "int4"]):  # fmt: skip
        assert run(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_an_old_layout_is_inspected_and_not_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = [*outer(256, 128), *(Tensor(f"blk.0.ffn_up.{i}.weight", (256, 64), TYPE_Q4_0) for i in range(8))]
    path = write(tmp_path / "m.gguf", moe_keys(1), tensors)
    assert "re-convert, it cannot be loaded" in out(capsys, "inspect", str(path))
    assert run(["plan", str(path)]) == 1
    assert "re-convert" in capsys.readouterr().err


def test_names_in_a_file_are_neither_markup_nor_control(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = moe_keys(1) | {"general.name": "[bold]evil[/bold]\x1b[2J\nname"}
    path = write(tmp_path / "m.gguf", keys, [*moe_tensors(1), Tensor("[red]x\x1b[2J", (8,))])
    text = out(capsys, "inspect", str(path), "--tensors")
    assert "\x1b" not in text
    assert "[bold]evil[/bold]?[2J?name" in text
    assert "[red]x?[2J" in text
    assert json.loads(out(capsys, "inspect", str(path), "--json"))["name"].endswith("\nname")


def test_plan_here_by_default(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    report = json.loads(out(capsys, "plan", str(demo_model), "--json", "--vram", "0"))
    assert report["verdict"] == "fits"
    assert report["n_ctx"] == 1024
    assert report["machine"]["ram_source"] in ("MemAvailable", "cgroup")
    assert 0 < report["machine"]["ram_bytes"] <= report["machine"]["ram_total_bytes"]
    assert report["vram"] == {"n_gpu_layers": 0, "n_cpu_moe": 0, "bytes": 0, "override_tensor": []}
    assert report["kv_bytes"] == 8 * 2 * 128 * 2 * 1024
    text = out(capsys, "plan", str(demo_model), "--vram", "0")
    assert text.startswith("fits: all experts fit in RAM")
    assert f"expertd serve --model {demo_model}" in text
    assert f"llama-server -m {demo_model} -c 1024 -np 1 -fa on" in text


def test_plan_for_another_machine(capsys: pytest.CaptureFixture[str], big_paths: list[Path]) -> None:
    text = out(capsys, "plan", str(big_paths[1]), "--ram", "32GiB", "--vram", "12GiB", "--ctx", "8192", "--kv", "q8_0",
               "--bandwidth", "60GB")  # fmt: skip
    assert "experts of the first" in text
    assert "--n-cpu-moe" in text
    assert "60 GB/s (as given)" in text
    report = json.loads(out(capsys, "plan", str(big_paths[1]), "--ram", "32GiB", "--vram", "0", "--json"))
    assert report["verdict"] == "usable"
    assert "--no-warmup" in report["llama_server_args"]
    assert report["expertd_args"][:3] == ["serve", "--model", str(big_paths[0])]


def test_plan_checks_flags_behind_a_double_dash(capsys: pytest.CaptureFixture[str], big_paths: list[Path]) -> None:
    report = json.loads(
        out(capsys, "plan", str(big_paths[0]), "--ram", "32G", "--vram", "0", "--json", "--", "--mlock")
    )
    assert any(w.startswith("your flags: --mlock") for w in report["warnings"])


def test_plan_reads_nvidia_smi(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, big_paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564, 23000'\necho 'Odd, One, 8192, 8000'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    report = json.loads(out(capsys, "plan", str(big_paths[0]), "--ram", "32GiB", "--json"))
    assert [g["name"] for g in report["machine"]["gpus"]] == ["NVIDIA GeForce RTX 4090", "Odd, One"]
    assert report["machine"]["vram_bytes"] == 31000 << 20
    assert report["vram"]["n_cpu_moe"] > 0
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    report = json.loads(out(capsys, "plan", str(big_paths[0]), "--ram", "32GiB", "--json"))
    assert report["machine"]["gpus"] == []
    smi.write_text("#!/bin/sh\necho '[N/A], [N/A]'\n")
    assert json.loads(out(capsys, "plan", str(big_paths[0]), "--ram", "32GiB", "--json"))["vram"]["bytes"] == 0


def test_plan_probes_the_disk(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    arguments = ["plan", str(demo_model), "--ram", "210M", "--vram", "0", "--json", "--probe"]
    code = run(arguments)
    shown = capsys.readouterr()
    if code == 1 and "past the page cache" in shown.err:
        pytest.skip("this file system has no O_DIRECT")
    rates = json.loads(shown.out)["machine"]["disk_bytes_per_second"]
    assert 0 < rates[0] <= rates[1]


def in_a_process(arguments: list[str], then: str) -> list[str]:
    """Run a verb in a process of its own, then print an expression there; gives the lines of the expression."""
    code = f"import sys\nfrom expertd.cli import run\nassert run({arguments!r}) == 0\n"
    code += f"print(*{then}, sep='\\n', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_a_60_gb_header_in_little_memory(capsys: pytest.CaptureFixture[str], big_paths: list[Path]) -> None:
    report = json.loads(out(capsys, "inspect", str(big_paths[2]), "--json"))
    assert report["file_bytes"] > 59_000_000_000
    assert (report["layers"], report["experts"], len(report["files"])) == (94, 128, 3)
    status = in_a_process(["inspect", str(big_paths[2])], "open('/proc/self/status')")
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert peak < 100_000


HEAVY = {"numpy", "gguf", "llama_cpp", "rich", "starlette"}


@pytest.mark.parametrize("verb", ["inspect", "plan"])
def test_json_needs_nothing_heavy(demo_model: Path, verb: str) -> None:
    loaded = in_a_process([verb, str(demo_model), "--json"], "sys.modules")
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("verb", ["inspect", "plan"])
def test_help_imports_no_model_code(verb: str) -> None:
    loaded = in_a_process([verb, "--help"], "sys.modules")
    assert not (HEAVY | {"expertd.model.gguf", "expertd.pages.memory"}) & set(loaded)
