"""The compute buffer: what llama.cpp reserves for the intermediate results of one micro-batch.

The widths of the model's own tensors say how large each result is; `drawing` has the order in which they come and go,
`arena` how ggml packs them. Scratch memory of matrix kernels is not in it: llama.cpp does not count it either.
Not here: the KV cache (`memory`).
"""

from __future__ import annotations

from expertd.model.arena import peak_nbytes
from expertd.model.attention import Attention
from expertd.model.drawing import Block, Drawing, Sizes
from expertd.model.expertmap import ExpertMap, LayerExperts
from expertd.model.gguf import GgufModel
from expertd.model.memory import padded, window_cells

_REPEATS = 3
"""Layers alike in a row beyond these change nothing, but for what an indexer has for each layer from the start."""


def compute_nbytes(
    experts: ExpertMap, attention: Attention, n_ctx: int, n_ubatch: int, *, flash: bool = True, n_outputs: int = 0
) -> int:
    """Bytes of the buffer for micro-batches of `n_ubatch` tokens; `n_outputs` of them want logits (0: all)."""
    tokens = max(1, min(n_ubatch, padded(n_ctx)))
    drawing = Drawing(
        Sizes(
            n_embd=experts.model.integer("embedding_length") or 0,
            n_vocab=n_vocab(experts.model),
            tokens=tokens,
            outputs=min(n_outputs or tokens, tokens),
            cells=padded(n_ctx),
            window_cells=window_cells(attention, n_ctx, n_ubatch) if attention.window else 0,
            flash=flash,
        )
    )
    by_layer = {m.layer: m for m in experts.layers}
    blocks = [_block(experts.model, attention, i, by_layer.get(i)) for i in range(len(attention.layers))]
    drawing.draw(_shortened(blocks))
    return peak_nbytes(drawing.nodes, drawing.leaves)


def n_vocab(model: GgufModel) -> int:
    """Tokens of the vocabulary, as the output matrix has them; 0 where nothing tells."""
    for name in ("output.weight", "token_embd.weight"):
        if (t := model.by_name.get(name)) is not None and len(t.shape) > 1:
            return t.shape[1]
    return model.integer("vocab_size") or 0


def _shortened(blocks: list[Block]) -> list[Block]:
    kept: list[Block] = []
    for b in blocks:
        if kept[-_REPEATS:] != [b] * _REPEATS or b.index:
            kept.append(b)
    return kept


class _Widths:
    """Rows and columns of one layer's matrices, 0 for those it has not."""

    def __init__(self, model: GgufModel, layer: int) -> None:
        self._by_name, self._prefix = model.by_name, f"blk.{layer}."

    def has(self, name: str) -> bool:
        return self._prefix + name in self._by_name

    def out(self, name: str) -> int:
        t = self._by_name.get(f"{self._prefix}{name}.weight")
        return t.shape[1] if t is not None and len(t.shape) > 1 else 0

    def into(self, name: str) -> int:
        t = self._by_name.get(f"{self._prefix}{name}.weight")
        return t.shape[0] if t is not None and t.shape else 0


def _block(model: GgufModel, attention: Attention, i: int, moe: LayerExperts | None) -> Block:
    w, memory = _Widths(model, i), attention.layers[i]
    heads = model.integers("attention.head_count", i + 1)[i]
    rank = (model.integer("attention.kv_lora_rank") or 0) if attention.latent else 0
    return Block(
        form=memory.form,
        q=w.out("attn_q") or w.out("attn_q_b"),
        q_rank=w.out("attn_q_a"),
        k=w.out("attn_k") or w.out("attn_kv_a_mqa"),
        v=w.out("attn_v"),
        qkv=w.out("attn_qkv"),
        heads=heads,
        attended=w.into("attn_output"),
        latent_q=heads * memory.k if rank else 0,
        latent_v=heads * rank,
        rope=model.integer("rope.dimension_count") or 0,
        index=w.out("indexer.attn_q_b") if memory.index else 0,
        top_k=model.integer("attention.indexer.top_k") or 0,
        norm_q=w.has("attn_q_norm.weight"),
        mixer=w.out("ssm_in") or w.out("attn_qkv"),
        delta=w.has("attn_gate.weight") or w.has("ssm_ba.weight"),
        conv=w.out("ssm_conv1d"),
        inner=w.into("ssm_out"),
        state=memory.state,
        ff=w.out("ffn_up") or w.out("ffn_gate"),
        # Gemma 4 has a plain feed-forward beside the experts: a shared expert in all but name.
        ff_shared=w.out("ffn_up_shexp") or (w.out("ffn_up") if moe else 0),
        ff_expert=(w.out("ffn_up_exps") or w.out("ffn_gate_up_exps") // 2) if moe else 0,
        gate_up=w.has("ffn_gate_up_exps.weight"),
        expert_bias=w.has("ffn_down_exps.bias"),
        used=moe.used if moe else 0,
        n_experts=moe.n_experts if moe else 0,
    )
