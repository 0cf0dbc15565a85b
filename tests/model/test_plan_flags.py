"""Command lines with a reason for each flag, and contradictions in someone's own."""

from __future__ import annotations

import pytest

from expertd.model.commands import arguments, expertd_flags, left_out, llama_server_flags
from expertd.model.expertmap import ExpertMap
from expertd.model.flags import contradictions, parse_flags
from expertd.model.plan import Machine, Wish, make_plan

GIB = 1 << 30


def test_every_flag_has_a_reason(big: ExpertMap) -> None:
    plan = make_plan(big, Machine(ram_nbytes=40 * GIB, vram_nbytes=16 * GIB, n_gpus=1, physical_cores=8), Wish())
    server = llama_server_flags(plan)
    args = arguments(server)
    assert args[:2] == ["-m", str(big.model.files[0])]
    for flag in ("-fa", "-t", "-ngl", "--n-cpu-moe", "-ub"):
        assert flag in args
    assert args[args.index("-fa") + 1] == "on"
    assert args[args.index("-t") + 1] == "8"
    assert not {"--no-mmap", "--mlock", "-lm"} & set(args)
    assert all(f.why for f in [*server, *expertd_flags(plan), *left_out(plan)])
    without = " ".join(f.why for f in left_out(plan))
    assert "no --no-mmap" in without
    assert "--n-cpu-moe the rule -ot" in without


def test_no_warmup_and_no_repack_only_when_experts_are_streamed(big: ExpertMap) -> None:
    streaming = arguments(llama_server_flags(make_plan(big, Machine(ram_nbytes=30 * GIB), Wish())))
    fitting = arguments(llama_server_flags(make_plan(big, Machine(ram_nbytes=80 * GIB), Wish())))
    for flag in ("--no-warmup", "--no-repack"):
        assert flag in streaming
        assert flag not in fitting


def test_the_daemons_own_parser_reads_its_line(big: ExpertMap) -> None:
    from expertd.config import load_config

    plan = make_plan(big, Machine(ram_nbytes=30 * GIB, vram_nbytes=8 * GIB, n_gpus=1), Wish(n_ctx=40960))
    args = arguments(expertd_flags(plan))
    names = {
        "--model": "model.path", "--ctx": "engine.n_ctx", "--steering": "cache.steering",
        "--budget": "cache.budget", "--threads": "engine.threads", "--warm": "warm.level",
    }  # fmt: skip
    given: dict[str, object] = {}
    for flag, value in zip(args[::2], args[1::2], strict=True):
        if flag == "--set":
            name, _, text = value.partition("=")
            given[name] = text
        else:
            given[names[flag]] = value
    config = load_config(None, {"HOME": "/nonexistent"}, given)
    assert config.engine.n_ctx == 40960
    assert config.engine.kv_type == "q8_0"
    assert config.engine.n_cpu_moe == plan.offload.n_cpu_moe
    assert config.engine.n_gpu_layers == plan.offload.n_gpu_layers
    assert (config.engine.n_ubatch or 512) == plan.n_ubatch


def test_flags_are_read_in_all_spellings() -> None:
    given = parse_flags(["-c", "4096", "--threads=8", "--flash-attn", "off", "--mlock", "--cpu-moe", "-ngl", "-1", "x"])
    assert given == {
        "-c": ["4096"],
        "-t": ["8"],
        "-fa": ["off"],
        "--mlock": [""],
        "-cmoe": [""],
        "-ngl": ["-1"],
        "x": [""],
    }


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--no-mmap", "larger than RAM swaps"), ("-lm none", "--no-mmap"), ("--mlock", "larger than the RAM"),
        ("-lm mmap+mlock", "--mlock"), ("-fa off -ctv q8_0 -ctk q8_0", "needs flash attention"),
        ("-ctk q8_0", "mixed types"), ("-ngl 0 --n-cpu-moe 20", "everything is in RAM already"),
        ("--cpu-moe -ot x=CPU", "the first match wins"), ("-ncmoe 200", "the model has 94 layers"),
        ("-c 0", "training context of 40960"), ("-c 99999", "was trained for 40960"), ("-ub 4096", "cut to -b"),
        ("-t 64", "there are 4 physical cores"), ("-np 4", "share the context"), ("-ngl 99", "no GPU answers here"),
        ("--warmup", "reads the whole file"), ("-nkvo -ngl 99", "crosses the bus"),
    ],
)  # fmt: skip
def test_contradictory_flags_are_named(big: ExpertMap, flags: str, says: str) -> None:
    plan = make_plan(big, Machine(ram_nbytes=30 * GIB, physical_cores=4), Wish())
    assert any(says in line for line in contradictions(plan, flags.split())), contradictions(plan, flags.split())


def test_the_plans_own_flags_do_not_contradict(big: ExpertMap) -> None:
    for vram in (0, 1, 8, 24, 96):
        machine = Machine(ram_nbytes=30 * GIB, vram_nbytes=vram * GIB, n_gpus=int(vram > 0), physical_cores=4)
        plan = make_plan(big, machine, Wish(n_ctx=40960))
        assert contradictions(plan, arguments(llama_server_flags(plan))) == []
