"""The command lines that follow from a plan, flag by flag with the reason for each.

Spelled as llama-server of late 2026 and `expertd serve` spell them; a test has both parsers read them where they are at
hand. Not here: deciding (`plan`), someone's own flags (`flags`).
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd.model.offload import override_rules
from expertd.model.plan import Plan
from expertd.units import format_size

_BATCH, _UBATCH = 2048, 512


@dataclass(frozen=True, slots=True)
class Flag:
    """Arguments that belong together, and why they are there. Without arguments: why something is left out."""

    args: tuple[str, ...]
    why: str

    @property
    def text(self) -> str:
        return " ".join(self.args)


def llama_server_flags(plan: Plan) -> list[Flag]:
    """For llama-server, in a sensible order."""
    flags = [
        Flag(("-m", _path(plan)), "the model; of a split one the first shard"),
        Flag(("-c", str(plan.n_ctx)), f"{format_size(plan.kv.total)} of KV cache; 0 would take all it was trained for"),
        Flag(("-np", "1"), "one conversation gets the whole context"),
    ]
    flags.append(_flash(plan))
    if plan.kv_type != "f16":
        flags.append(Flag(("-ctk", plan.kv_type, "-ctv", plan.kv_type), _kv_reason(plan)))
    if plan.n_ubatch != _UBATCH:
        batch = ("-b", str(plan.n_ubatch)) if plan.n_ubatch > _BATCH else ()
        flags.append(Flag((*batch, "-ub", str(plan.n_ubatch)), _ubatch_reason(plan)))
    flags.append(
        Flag(("-t", str(plan.machine.physical_cores)), "physical cores: decoding waits for memory, not for threads")
    )
    flags += _gpu_flags(plan)
    if plan.streams:
        flags += [
            Flag(("--no-warmup",), "the warm-up runs all experts: it would read the whole file"),
            Flag(("--no-repack",), "repacking copies experts into memory that cannot be dropped"),
            Flag(("-cram", "0"), "the prompt cache would take up to 8 GiB from the experts"),
        ]
    return flags


def expertd_flags(plan: Plan) -> list[Flag]:
    """For `expertd serve`."""
    flags = [
        Flag(("--model", _path(plan)), "the model; any shard of a split one"),
        Flag(("--ctx", str(plan.n_ctx)), f"{format_size(plan.kv.total)} of KV cache"),
    ]
    if not plan.experts.layers:
        flags.append(Flag(("--steering", "off"), "no experts: steering gives nothing"))
    elif plan.streams:
        flags.append(Flag(("--steering", "on"), "experts exceed the RAM that is left for them"))
        flags.append(Flag(("--budget", "auto"), "follows what the machine and the cgroup leave"))
    else:
        flags.append(Flag(("--warm", "all"), "all experts fit: read them once, at the start"))
    flags.append(Flag(("--threads", str(plan.machine.physical_cores)), "physical cores"))
    if plan.kv_type != "f16":
        typed = ("--set", f"engine.kv_type={plan.kv_type}", "--set", "engine.flash_attention=on")
        flags.append(Flag(typed, _kv_reason(plan)))
    elif not plan.flash:
        flags.append(Flag(("--set", "engine.flash_attention=off"), "as asked for"))
    if plan.n_ubatch != _UBATCH:
        n = plan.n_ubatch
        flags.append(Flag(("--set", f"engine.n_ubatch={n}", "--set", f"engine.n_batch={n}"), _ubatch_reason(plan)))
    if plan.offload.used:
        args = ("--set", f"engine.n_gpu_layers={plan.offload.n_gpu_layers}")
        flags.append(Flag(args, "needs a llama-cpp-python built for the GPU"))
        if plan.offload.n_cpu_moe:
            flags.append(Flag(("--set", f"engine.n_cpu_moe={plan.offload.n_cpu_moe}"), _cpu_moe_reason(plan)))
    return flags


def left_out(plan: Plan) -> list[Flag]:
    """Flags that people add and should not, with the reason."""
    nothing = [Flag((), "no --no-mmap (-lm none): mapped pages can be dropped and read again, a private copy cannot")]
    if plan.streams or plan.left_nbytes < 0:
        nothing.append(Flag((), "no --mlock (-lm mlock): the model is larger than the RAM it could be locked in"))
    if plan.offload.n_cpu_moe:
        rules = ", ".join(f"-ot '{rule}'" for rule in override_rules(plan.experts, plan.offload))
        nothing.append(Flag((), f"instead of --n-cpu-moe the rule {rules} says the same; the first match wins"))
    return nothing


def arguments(flags: list[Flag]) -> list[str]:
    """The command line without its program."""
    return [arg for flag in flags for arg in flag.args]


def _path(plan: Plan) -> str:
    """Absolute, but links kept: a shard's name matters, its target's does not."""
    return str(plan.experts.model.files[0].absolute())


def _flash(plan: Plan) -> Flag:
    if not plan.flash:
        return Flag(("-fa", "off"), "as asked for; the score matrix grows with context x micro-batch")
    why = "scores are never stored, so that the compute buffer stays small"
    return Flag(("-fa", "on"), why + ("; a quantised value cache needs it" if plan.kv_type != "f16" else ""))


def _kv_reason(plan: Plan) -> str:
    return f"the KV cache takes {format_size(plan.kv.total)} in {plan.kv_type}"


def _ubatch_reason(plan: Plan) -> str:
    cost = f"{format_size(plan.compute_nbytes)} of compute buffer"
    return f"long prompts go over the experts once for {plan.n_ubatch} tokens ({cost})"


def _cpu_moe_reason(plan: Plan) -> str:
    return (
        f"experts of the first {plan.offload.n_cpu_moe} layers stay in RAM: the fewest with which "
        f"{format_size(plan.offload.nbytes)} fit in {format_size(plan.machine.vram_nbytes)} of VRAM with 1 GiB to spare"
    )


def _gpu_flags(plan: Plan) -> list[Flag]:
    if not plan.offload.used:
        return [Flag(("-ngl", "0"), "nothing useful fits in the VRAM")] if plan.machine.vram_nbytes else []
    n = plan.offload.n_gpu_layers
    why = (
        "attention and KV cache of all layers in VRAM"
        if n > plan.experts.n_layers
        else f"{n - 1} layers and the output fit"
    )
    flags = [Flag(("-ngl", str(n)), why)]
    if plan.offload.n_cpu_moe:
        flags.append(Flag(("--n-cpu-moe", str(plan.offload.n_cpu_moe)), _cpu_moe_reason(plan)))
    return flags
