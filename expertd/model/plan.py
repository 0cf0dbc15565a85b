"""Whether a model will run on a machine, how, and what to expect: a pure computation on its header.

What the machine has comes in as arguments (`Machine`), what is asked for as `Wish`; docs/memory.md derives each figure.
Not here: reading the machine (pages, `gpu`), the flags (`commands`), contradictions in someone's own flags (`flags`).

1. The KV cache in the type asked for; else f16, or q8_0 where f16 takes more than a tenth of the memory it lies in.
2. The micro-batch asked for; 512, or larger where experts come from a disk or over a bus and it costs little memory.
3. What goes to the GPU (`offload`).
4. RAM left for experts: what is available, less dense weights, KV cache, compute buffer, the process and a reserve.
5. The verdict by the ratio of that to the expert bytes that RAM must hold.
6. The forecast of the decode's speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from expertd.errors import ModelUnsupportedError, UsageError
from expertd.model.attention import Attention, read_attention
from expertd.model.compute import compute_nbytes, n_vocab
from expertd.model.expertmap import ExpertMap
from expertd.model.forecast import Forecast, Rates, TokenReads, forecast
from expertd.model.memory import KvBytes, kv_nbytes
from expertd.model.names import Role
from expertd.model.offload import NOTHING, Offload, choose_offload
from expertd.model.ubatch import DEFAULT_UBATCH, MEMORY_SHARE, WIDE_UBATCHES

PROCESS_NBYTES = 200 << 20
"""Interpreter, libraries, tokenizer and request buffers of a daemon, as anonymous memory."""
FITS, GOOD, USABLE = 1.0, 0.7, 0.4
_KV_SHARE = 0.10
_LOGITS = 4
_OUTPUTS = 1
"""Tokens of a micro-batch with logits: expertd and llama-server sample from the last one alone."""
_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes that are free to use, where they are scarcest; `reserve_nbytes` of them are left alone."""

    ram_nbytes: int
    vram_nbytes: int = 0
    n_gpus: int = 0
    physical_cores: int = 1
    reserve_nbytes: int = 0
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for; None leaves the choice to the plan. `n_ctx` and `n_ubatch` are tokens."""

    n_ctx: int = 4096
    kv_type: str | None = None
    n_ubatch: int | None = None
    flash: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome. `ram_ratio` is RAM left for experts over the expert bytes that RAM must hold; without such experts,
    RAM over what is needed of it. `left_nbytes` is negative where not even the rest fits."""

    experts: ExpertMap
    machine: Machine
    verdict: str
    ram_ratio: float
    n_ctx: int
    n_ubatch: int
    kv_type: str
    flash: bool
    kv: KvBytes
    compute_nbytes: int
    output_nbytes: int
    offload: Offload
    fixed_nbytes: int
    left_nbytes: int
    ram_expert_nbytes: int
    forecast: Forecast
    warnings: tuple[str, ...]

    @property
    def expert_budget_nbytes(self) -> int:
        """Bytes of experts that RAM will hold."""
        return max(0, min(self.left_nbytes, self.ram_expert_nbytes))

    @property
    def total_nbytes(self) -> int:
        """What llama.cpp reports when it has loaded: weights of the trunk, KV cache, compute and output buffers."""
        weights = self.experts.model.tensor_nbytes - self.experts.buckets[Role.NEXTN]
        return weights + self.kv.total + self.compute_nbytes + self.output_nbytes

    @property
    def streams(self) -> bool:
        """Experts will be read from disk while decoding."""
        return self.ram_expert_nbytes > self.expert_budget_nbytes


def default_context(experts: ExpertMap) -> int:
    """Tokens for who does not say: enough for a chat, never more than the model was trained for."""
    trained = experts.model.integer("context_length") or 0
    return min(_CONTEXT, trained) if trained > 0 else _CONTEXT


def make_plan(experts: ExpertMap, machine: Machine, wish: Wish) -> Plan:
    """Raises ModelUnsupportedError for a model that cannot be loaded, UsageError for wishes that contradict each other
    or the model."""
    if experts.unsupported:
        raise ModelUnsupportedError(
            f"{experts.model.files[0]}: {experts.unsupported}", hint="re-convert it with a current llama.cpp"
        )
    if wish.n_ctx < 1 or (wish.n_ubatch is not None and wish.n_ubatch < 1):
        raise UsageError("a context and a micro-batch have at least one token", hint="--ctx 4096 --ubatch 512")
    attention = read_attention(experts.model, experts.n_layers)
    kv_type = wish.kv_type or _choose_kv(attention, machine, wish)
    if not wish.flash and kv_type not in ("f16", "f32", "bf16"):
        raise UsageError(f"a KV cache of {kv_type} needs flash attention", hint="drop one of the two")
    first = _assess(experts, attention, machine, wish, kv_type, wish.n_ubatch or DEFAULT_UBATCH)
    if wish.n_ubatch is not None or not experts.layers or not (first.streams or first.offload.n_cpu_moe):
        return first
    for n_ubatch in WIDE_UBATCHES:
        memory = machine.vram_nbytes if first.offload.used else machine.ram_nbytes
        wide = _assess(experts, attention, machine, wish, kv_type, n_ubatch)
        cost = wide.compute_nbytes + wide.kv.total - first.compute_nbytes - first.kv.total
        same = wide.verdict == first.verdict and wide.offload.n_cpu_moe <= first.offload.n_cpu_moe + 1
        if n_ubatch <= wish.n_ctx and cost <= memory * MEMORY_SHARE and same:
            return wide
    return first


def _choose_kv(attention: Attention, machine: Machine, wish: Wish) -> str:
    """Number 1."""
    plain = kv_nbytes(attention, wish.n_ctx, wish.n_ubatch or DEFAULT_UBATCH, "f16").total
    memory = machine.vram_nbytes or machine.ram_nbytes
    if plain <= memory * _KV_SHARE or not wish.flash:
        return "f16"
    try:
        kv_nbytes(attention, wish.n_ctx, wish.n_ubatch or DEFAULT_UBATCH, "q8_0")
    except UsageError:
        return "f16"
    return "q8_0"


def _assess(
    experts: ExpertMap, attention: Attention, machine: Machine, wish: Wish, kv_type: str, n_ubatch: int
) -> Plan:
    n_ubatch = min(n_ubatch, wish.n_ctx)
    kv = kv_nbytes(attention, wish.n_ctx, n_ubatch, kv_type)
    compute = compute_nbytes(experts, attention, wish.n_ctx, n_ubatch, flash=wish.flash, n_outputs=_OUTPUTS)
    output = n_vocab(experts.model) * _LOGITS
    offload = (
        choose_offload(experts, kv, compute, machine.vram_nbytes, machine.n_gpus) if machine.vram_nbytes else NOTHING
    )
    dense = experts.dense_nbytes + experts.buckets[Role.UNKNOWN] - offload.dense_nbytes
    fixed = dense + kv.total - offload.kv_nbytes + output + PROCESS_NBYTES + machine.reserve_nbytes
    fixed += 0 if offload.used else compute
    in_ram = experts.expert_nbytes - offload.expert_nbytes
    left = machine.ram_nbytes - fixed
    ratio = left / in_ram if in_ram else machine.ram_nbytes / fixed
    plan = Plan(
        experts=experts,
        machine=machine,
        verdict=_verdict(ratio, in_ram > 0),
        ram_ratio=max(0.0, ratio),
        n_ctx=wish.n_ctx,
        n_ubatch=n_ubatch,
        kv_type=kv_type,
        flash=wish.flash,
        kv=kv,
        compute_nbytes=compute,
        output_nbytes=output,
        offload=offload,
        fixed_nbytes=fixed,
        left_nbytes=left,
        ram_expert_nbytes=in_ram,
        forecast=forecast(_reads(experts, offload, left, in_ram), machine.rates),
        warnings=(),
    )
    return replace(plan, warnings=_warnings(plan, attention))


def _verdict(ratio: float, has_experts: bool) -> str:
    """Number 5. Without experts in RAM every byte is read for every token: it fits or it does not."""
    if ratio >= FITS:
        return "fits"
    if not has_experts:
        return "poor"
    return "good" if ratio >= GOOD else "usable" if ratio >= USABLE else "poor"


def _reads(experts: ExpertMap, offload: Offload, left: int, in_ram: int) -> TokenReads:
    """Where the bytes of one token lie."""
    total = experts.expert_nbytes
    share = in_ram / total if total else 0.0
    from_ram = round(experts.token_expert_nbytes * share)
    dense_total = max(1, experts.dense_nbytes)
    moved = min(1.0, offload.dense_nbytes / dense_total)
    on_gpu = round(experts.token_dense_nbytes * moved)
    return TokenReads(
        dense_ram=experts.token_dense_nbytes - on_gpu,
        experts_ram=from_ram,
        vram=on_gpu + experts.token_expert_nbytes - from_ram,
        held=min(1.0, max(0, left) / in_ram) if in_ram else 1.0,
        layers=experts.n_layers,
    )


def _warnings(plan: Plan, attention: Attention) -> tuple[str, ...]:
    model = plan.experts.model
    found = [*plan.experts.warnings, *attention.notes]
    trained = model.integer("context_length") or 0
    if trained and plan.n_ctx > trained:
        found.append(f"a context of {plan.n_ctx} is longer than the {trained} tokens that the model was trained for")
    if plan.left_nbytes < 0:
        found.append(
            f"{plan.fixed_nbytes} bytes are needed beside the experts, {-plan.left_nbytes} more than there is: "
            "take a shorter context, a smaller quantisation or more RAM"
        )
    elif plan.streams and plan.expert_budget_nbytes < plan.experts.token_expert_nbytes:
        found.append("RAM for experts is below what one token reads: every token waits for the disk")
    if plan.machine.vram_nbytes and not plan.offload.used:
        found.append("nothing useful fits in the VRAM: it is left alone")
    if plan.kv_type in ("q4_0", "q4_1"):
        found.append(f"a KV cache of {plan.kv_type} costs quality; q8_0 does not measurably")
    return tuple(dict.fromkeys(found))
