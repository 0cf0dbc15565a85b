"""What goes to the GPU: the smallest `n_cpu_moe` that fits, or, where not even that, how many whole layers.

With every layer on the GPU, the experts of the first `n_cpu_moe` layers stay in RAM: attention and KV cache want the
fast memory, experts are read in small parts. Not here: reading how much there is (`gpu`), the flags (`commands`).

1. All layers on the GPU and the fewest layers' experts in RAM that leave `SPARE_NBYTES` a GPU free.
2. Else the last layers as a whole, without experts, as many as fit, each with its KV cache.
3. Else nothing.
What is counted on the GPU: weights of its layers, output matrix (a copy where it is tied), their KV cache, the compute
buffer, and room for two expert tensors, since llama.cpp brings experts over for prompts when they live in RAM.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd.model.expertmap import ExpertMap
from expertd.model.memory import KvBytes
from expertd.model.report import dense_by_layer

SPARE_NBYTES = 1 << 30
"""Left free on each GPU: CUDA's own context, fragmentation, the desktop. A layer more may leave up to another GB."""
ALL_LAYERS = 99


@dataclass(frozen=True, slots=True)
class Offload:
    """`n_gpu_layers` counts the output as one; `nbytes` is what lies on the GPUs; the rest is what stays in RAM."""

    n_gpu_layers: int
    n_cpu_moe: int
    nbytes: int
    expert_nbytes: int
    """Experts on the GPU."""
    dense_nbytes: int
    """Dense weights on the GPU that need no place in RAM."""
    kv_nbytes: int

    @property
    def used(self) -> bool:
        return self.n_gpu_layers > 0


NOTHING = Offload(0, 0, 0, 0, 0, 0)


def choose_offload(experts: ExpertMap, kv: KvBytes, compute: int, vram: int, n_gpus: int = 1) -> Offload:
    """The placement for `vram` free bytes on `n_gpus` GPUs; `compute` is the compute buffer. All in bytes."""
    room = vram - SPARE_NBYTES * max(1, n_gpus)
    n = experts.n_layers
    if room <= 0 or not n:
        return NOTHING
    dense = dense_by_layer(experts)
    moe = {m.layer: m.nbytes for m in experts.layers}
    output, moved = _output_nbytes(experts)
    layers = sum(dense.get(i, 0) for i in range(n))
    fixed = layers + output + kv.total + compute
    streamed = _streamed_nbytes(experts)
    for n_cpu_moe in (0, *(layer + 1 for layer in sorted(moe))):
        kept = sum(nbytes for layer, nbytes in moe.items() if layer >= n_cpu_moe)
        nbytes = fixed + kept + (streamed if n_cpu_moe else 0)
        if nbytes <= room:
            return Offload(ALL_LAYERS, n_cpu_moe, nbytes, kept, layers + moved, kv.total)
    return _whole_layers(experts, kv, compute + streamed, room, dense)


def _whole_layers(experts: ExpertMap, kv: KvBytes, overhead: int, room: int, dense: dict[int, int]) -> Offload:
    """Rule 2: from the last layer down; llama.cpp counts the output as the first to go."""
    output, moved = _output_nbytes(experts)
    nbytes, cached, best = overhead + output, 0, NOTHING
    n = experts.n_layers
    for count, layer in enumerate(range(n - 1, -1, -1), start=2):
        here = kv.layers[layer] if layer < len(kv.layers) else 0
        nbytes += dense.get(layer, 0) + here
        moved += dense.get(layer, 0)
        cached += here
        if nbytes > room:
            break
        n_cpu_moe = n if experts.layers else 0
        best = Offload(min(count, n + 1), n_cpu_moe, nbytes, 0, moved, cached)
    return best


def _output_nbytes(experts: ExpertMap) -> tuple[int, int]:
    """(bytes that the output takes on the GPU, bytes that then need no place in RAM)."""
    by_name = experts.model.by_name
    norm = by_name["output_norm.weight"].nbytes if "output_norm.weight" in by_name else 0
    if "output.weight" in by_name:
        n = norm + by_name["output.weight"].nbytes
        return n, n
    tied = by_name["token_embd.weight"].nbytes if "token_embd.weight" in by_name else 0
    return norm + tied, norm


def _streamed_nbytes(experts: ExpertMap) -> int:
    """The two largest expert tensors of a layer."""
    return max((sum(sorted((t.nbytes for t in m.tensors), reverse=True)[:2]) for m in experts.layers), default=0)


def override_rules(experts: ExpertMap, offload: Offload) -> tuple[str, ...]:
    """The `-ot` rules that say the same as `n_cpu_moe`, in the order of trial: the first match wins."""
    layers = [m.layer for m in experts.layers if m.layer < offload.n_cpu_moe]
    if not offload.used or not layers:
        return ()
    which = r"\d+" if len(layers) == len(experts.layers) else f"({'|'.join(map(str, layers))})"
    return (rf"blk\.{which}\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU",)
