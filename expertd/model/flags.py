"""Contradictions in someone's own llama-server flags, for a model and a machine.

Not here: the flags to take (`commands`).
"""

from __future__ import annotations

from collections.abc import Sequence

from expertd.model.memory import KV_TYPES
from expertd.model.plan import Plan

_LONG = {
    "--ctx-size": "-c", "--threads": "-t", "--batch-size": "-b", "--ubatch-size": "-ub", "--flash-attn": "-fa",
    "--cache-type-k": "-ctk", "--cache-type-v": "-ctv", "--gpu-layers": "-ngl", "--n-gpu-layers": "-ngl",
    "--n-cpu-moe": "-ncmoe", "--cpu-moe": "-cmoe", "--override-tensor": "-ot", "--load-mode": "-lm",
    "--no-kv-offload": "-nkvo", "--parallel": "-np", "--cache-ram": "-cram",
}  # fmt: skip
_QUANTISED = {t for t in KV_TYPES if t.startswith("q")}
_WITHOUT_VALUE = {
    "--no-mmap",
    "--mmap",
    "--mlock",
    "-cmoe",
    "-nkvo",
    "--swa-full",
    "--no-repack",
    "--no-warmup",
    "--warmup",
}


def parse_flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Values by short name, in order; a flag without a value has an empty one. Unknown flags are kept as they are."""
    found: dict[str, list[str]] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        name = _LONG.get(name, name)
        takes = not equals and name.startswith("-") and name not in _WITHOUT_VALUE
        if takes and words and (not words[0].startswith("-") or words[0].lstrip("-").isdigit()):
            value = words.pop(0)
        found.setdefault(name, []).append(value)
    return found


def contradictions(plan: Plan, arguments: Sequence[str]) -> list[str]:
    """What in these llama-server flags contradicts itself, the model or the machine; one line each."""
    given = parse_flags(arguments)
    return [*_loading(plan, given), *_attention(plan, given), *_placement(plan, given), *_sizes(plan, given)]


def _last(given: dict[str, list[str]], name: str) -> str | None:
    return given[name][-1] if name in given else None


def _loading(plan: Plan, given: dict[str, list[str]]) -> list[str]:
    found = []
    mode = _last(given, "-lm") or ""
    if "--no-mmap" in given or mode in ("none", "dio", "mlock"):
        why = (
            "a private copy larger than RAM swaps or is killed" if plan.streams else "pages cannot be shared or dropped"
        )
        found.append(f"--no-mmap (-lm none, mlock, dio): {why}")
    if ("--mlock" in given or "mlock" in mode) and plan.streams:
        found.append("--mlock (-lm mlock): the model is larger than the RAM that is left for it")
    if plan.streams and "--warmup" in given:
        found.append("--warmup: it runs all experts and reads the whole file")
    return found


def _attention(plan: Plan, given: dict[str, list[str]]) -> list[str]:
    found = []
    off = _last(given, "-fa") in ("off", "0", "false")
    if off and _last(given, "-ctv") in _QUANTISED:
        found.append(
            "-ctv " + str(_last(given, "-ctv")) + " with -fa off: a quantised value cache needs flash attention"
        )
    k, v = _last(given, "-ctk"), _last(given, "-ctv")
    if k != v and (k in _QUANTISED or v in _QUANTISED):
        found.append(f"-ctk {k or 'f16'} with -ctv {v or 'f16'}: mixed types run on slow paths")
    if "--swa-full" in given and plan.kv.window:
        found.append("--swa-full: layers with a window keep the whole context too")
    return found


def _placement(plan: Plan, given: dict[str, list[str]]) -> list[str]:
    found = []
    experts_placed = [name for name in ("-ncmoe", "-cmoe", "-ot") if name in given]
    layers = _last(given, "-ngl")
    if experts_placed and layers == "0":
        found.append(f"{' '.join(experts_placed)} with -ngl 0: everything is in RAM already")
    if experts_placed and not plan.experts.layers:
        found.append(f"{' '.join(experts_placed)}: the model has no experts")
    if len(experts_placed) > 1:
        found.append(
            f"{' and '.join(experts_placed)} together: rules are tried in the order given, the first match wins"
        )
    count = _last(given, "-ncmoe")
    if count and count.isdigit() and int(count) > plan.experts.n_layers:
        found.append(f"-ncmoe {count}: the model has {plan.experts.n_layers} layers")
    if "-nkvo" in given and layers not in (None, "0"):
        found.append("-nkvo with -ngl: attention then crosses the bus for each layer and token")
    if layers not in (None, "0") and not plan.machine.vram_nbytes:
        found.append(f"-ngl {layers}: no GPU answers here (--vram plans for one)")
    return found


def _sizes(plan: Plan, given: dict[str, list[str]]) -> list[str]:
    found = []
    numbers = {
        name: int(value) for name in ("-c", "-t", "-b", "-ub", "-np") if (value := _last(given, name) or "").isdigit()
    }
    trained = plan.experts.model.integer("context_length") or 0
    if numbers.get("-c") == 0:
        found.append(f"-c 0: the whole training context of {trained} tokens is allocated")
    elif trained and numbers.get("-c", 0) > trained:
        found.append(f"-c {numbers['-c']}: the model was trained for {trained}")
    if numbers.get("-ub", 512) > numbers.get("-b", 2048):
        found.append(f"-ub {numbers.get('-ub', 512)} above -b {numbers.get('-b', 2048)}: it is cut to -b")
    if numbers.get("-t", 0) > plan.machine.physical_cores:
        found.append(
            f"-t {numbers['-t']}: there are {plan.machine.physical_cores} physical cores; more threads are slower"
        )
    if numbers.get("-np", 1) > 1:
        found.append(
            f"-np {numbers['-np']}: the conversations share the context of {numbers.get('-c', plan.n_ctx)} tokens"
        )
    return found
