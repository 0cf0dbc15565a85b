"""The graph of a transformer in outline: which intermediate results llama.cpp computes, in which order, from which.

It follows build_qkv, build_attn, build_moe_ffn, build_ffn, build_mamba2_layer and the delta nets of llama.cpp of late
2026, as its eval callback shows them. Only sizes matter, so an operation is a node and weights are left out; recurrent
layers of other kinds are drawn as delta nets. Not here: where the widths come from (`compute`), packing (`arena`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertd.model.arena import Node
from expertd.model.attention import Form

_F32, _F16, _I64 = 4, 2, 8


@dataclass(frozen=True, slots=True)
class Block:
    """The widths of one layer, in elements a token; 0 for what it has not.

    `qkv` is query, key and value in one tensor; `attended` what attention gives to its output matrix; `latent_q` the
    absorbed query of latent attention, heads x (rank + rope), and `latent_v` heads x rank; `index` the query of a
    sparse attention's indexer, which picks `top_k` tokens; `mixer` a recurrent layer's projection, `conv` its convolved
    part, `inner` what it gives to its output matrix, `state` its elements in all.
    """

    form: Form
    q: int = 0
    q_rank: int = 0
    k: int = 0
    v: int = 0
    qkv: int = 0
    heads: int = 0
    attended: int = 0
    latent_q: int = 0
    latent_v: int = 0
    rope: int = 0
    index: int = 0
    top_k: int = 0
    norm_q: bool = False
    mixer: int = 0
    delta: bool = False
    conv: int = 0
    inner: int = 0
    state: int = 0
    ff: int = 0
    ff_shared: int = 0
    ff_expert: int = 0
    gate_up: bool = False
    expert_bias: bool = False
    used: int = 0
    n_experts: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all layers share: tokens of the micro-batch, of them with logits, cells of the caches."""

    n_embd: int
    n_vocab: int
    tokens: int
    outputs: int
    cells: int
    window_cells: int
    flash: bool


class Drawing:
    """Collects the nodes in the order of execution. `leaves` are inputs that no node reads and nothing frees."""

    def __init__(self, sizes: Sizes) -> None:
        self.s = sizes
        self.nodes: list[Node] = []
        tokens, mask = sizes.tokens, _F16 if sizes.flash else _F32
        # An embedding may be given in place of a token: room for it is always kept.
        self.leaves = [Node(sizes.n_embd * tokens * _F32)]
        self._position = Node(tokens * _F32, is_input=True)
        self._mask = Node(sizes.cells * tokens * mask, is_input=True)
        self._index_mask = Node(self._mask.nbytes, is_input=True)
        self._window_mask = Node(sizes.window_cells * tokens * mask, is_input=True)
        self._slots = Node(tokens * _I64, is_input=True)
        self._wanted = Node(sizes.outputs * _F32, is_input=True)
        self._value_slots: dict[tuple[bool, int], Node] = {}
        self._stream = self._add(sizes.n_embd * tokens, [Node(tokens * _F32, is_input=True)])

    def draw(self, blocks: Sequence[Block]) -> None:
        for i, block in enumerate(blocks):
            self._layer(block, last=i == len(blocks) - 1)
        self._add(self.s.n_vocab * self.s.outputs, [self._norm(self._stream)])

    def _add(self, elements: int, sources: Sequence[Node], *, in_place: bool = False) -> Node:
        node = Node(elements * _F32, sources, in_place=in_place)
        self.nodes.append(node)
        return node

    def _view(self, node: Node) -> Node:
        view = Node(node.nbytes, [node], view_of=node)
        self.nodes.append(view)
        return view

    def _norm(self, node: Node) -> Node:
        n = node.nbytes // _F32
        return self._add(n, [self._add(n, [node], in_place=True)], in_place=True)

    def _layer(self, b: Block, *, last: bool) -> None:
        source, n_embd = self._stream, self.s.n_embd
        cur = source
        if b.form is not Form.NONE:
            cur = self._norm(source)
            if b.form is Form.RECURRENT:
                cur = self._delta(b, cur) if b.delta or not b.mixer else self._mamba(b, cur)
            else:
                cur = self._latent(b, cur) if b.latent_q else self._attention(b, cur)
        n = self.s.outputs if last else self.s.tokens
        if last:
            cur = self._add(n_embd * n, [cur, self._wanted])
            source = self._add(n_embd * n, [source, self._wanted])
        residual = self._add(n_embd * n, [cur, source], in_place=True)
        self._stream = residual
        if not (b.ff or b.ff_expert):
            return
        cur = self._norm(residual)
        out = self._experts(b, cur, n) if b.ff_expert else self._feed_forward(b.ff, cur, n)
        if b.ff_expert and b.ff_shared:
            out = self._add(n_embd * n, [out, self._feed_forward(b.ff_shared, cur, n)], in_place=True)
        self._stream = self._add(n_embd * n, [out, residual], in_place=True)

    def _attention(self, b: Block, cur: Node) -> Node:
        t = self.s.tokens
        gated = b.q > b.attended > 0
        q = whole = self._add((b.qkv or b.q) * t, [cur])
        q = self._rotated(b, self._view(q), b.attended or b.q)
        if b.qkv:
            v, k = self._view(whole), self._view(whole)
        else:
            # Values come before keys, so that the rotation of the keys can be fused with their way into the cache.
            v = self._view(self._add(b.v * t, [cur]))
            k = self._view(self._add(b.k * t, [cur]))
        k = self._rotated(b, k, b.k or b.attended)
        self._store(b, k, v)
        cur = self._attend(b, q, (b.attended or b.q) * t)
        if gated:
            gate = self._add(b.attended * t, [self._view(whole)])
            gate = self._add(b.attended * t, [gate], in_place=True)
            cur = self._add(b.attended * t, [cur, gate], in_place=True)
        return self._add(self.s.n_embd * t, [cur])

    def _rotated(self, b: Block, node: Node, width: int) -> Node:
        """Norm of each head and rotary embedding: a place of its own first, since what comes in is a view."""
        if b.norm_q:
            node = self._add(width * self.s.tokens, [node], in_place=True)
            node = self._add(width * self.s.tokens, [node], in_place=True)
        return self._add(width * self.s.tokens, [node, self._position], in_place=True)

    def _store(self, b: Block, k: Node, v: Node | None) -> None:
        """Into the cache, which is another buffer. Without flash attention a value needs a slot for each element."""
        self._add(0, [self._view(k), self._slots])
        if v is None:
            return
        slots = self._slots
        if not self.s.flash:
            key = (b.form is Form.WINDOW, b.v)
            slots = self._value_slots.setdefault(key, Node(self.s.tokens * b.v * _I64, is_input=True))
        self._add(0, [self._view(v), slots])

    def _attend(self, b: Block, q: Node, elements: int, mask: Node | None = None) -> Node:
        window = b.form is Form.WINDOW
        mask = mask or (self._window_mask if window else self._mask)
        if self.s.flash:
            return self._view(self._add(elements, [self._view(q), mask]))
        scores = (self.s.window_cells if window else self.s.cells) * self.s.tokens * b.heads
        kq = self._add(scores, [self._view(q)])
        kq = self._add(scores, [kq, mask], in_place=True)
        return self._view(self._add(elements, [self._view(self._add(elements, [kq]))]))

    def _latent(self, b: Block, cur: Node) -> Node:
        """Multi-head latent attention with the key matrix absorbed in the query."""
        t = self.s.tokens
        q = self._norm(self._add(b.q_rank * t, [cur])) if b.q_rank else cur
        q = self._view(self._add(b.q * t, [q]))
        absorbed = self._view(self._add(b.latent_v * t, [self._view(q)]))
        rotated = self._add(b.heads * b.rope * t, [self._view(q), self._position])
        q = self._add(b.latent_q * t, [absorbed, rotated])
        compressed = self._add(b.k * t, [cur])
        key = self._norm_of_part(self._view(compressed), (b.k - b.rope) * t)
        rotated = self._add(b.rope * t, [self._view(compressed), self._position])
        key = self._add(b.k * t, [self._view(key), rotated])
        self._store(b, key, None)
        mask = self._sparse_mask(b, cur) if b.index else None
        attended = self._attend(b, q, b.latent_v * t, mask)
        value = self._view(self._add(b.attended * t, [self._view(attended)]))
        return self._add(self.s.n_embd * t, [self._view(self._add(b.attended * t, [value]))])

    def _sparse_mask(self, b: Block, cur: Node) -> Node:
        """The mask of a sparse attention: all is hidden, then the tokens that the indexer scored highest are shown."""
        t, elements = self.s.tokens, self._mask.nbytes // _F32
        blank = Node(b.top_k * t * _F32)
        self.leaves.append(blank)
        shown = self._add(b.top_k * t, [blank], in_place=True)
        query = self._add(b.index * t, [self._view(self._add(b.index * t, [cur])), self._position], in_place=True)
        query = self._add(b.index * t, [query])
        scores = self._add(self.s.cells * t, [self._view(query), self._index_mask])
        chosen = self._add(b.top_k * t, [self._add(b.top_k * t, [scores])])
        hidden = self._add(elements, [self._mask])
        marked = Node(hidden.nbytes, [shown, self._view(chosen), self._view(hidden)], view_of=hidden)
        self.nodes.append(marked)
        return self._add(elements, [marked, self._mask], in_place=True)

    def _norm_of_part(self, part: Node, elements: int) -> Node:
        return self._add(elements, [self._add(elements, [part], in_place=True)], in_place=True)

    def _mamba(self, b: Block, cur: Node) -> Node:
        """Mamba-2: projection, convolution over time, scan, gate, norm, output."""
        t = self.s.tokens
        projected = self._view(self._add(b.mixer * t, [cur]))
        joined = self._add(b.conv * t, [self._view(projected)])
        self._add(0, [self._view(joined)])
        convolved = self._add(b.conv * t, [joined])
        convolved = self._add(b.conv * t, [convolved], in_place=True)
        x = self._view(convolved)
        scanned = self._add(b.inner * t + b.state, [x])
        gate = self._add(b.inner * t, [self._view(projected)])
        y = self._add(b.inner * t, [x])
        y = self._add(b.inner * t, [self._view(scanned), y], in_place=True)
        mixed = self._add(b.inner * t, [gate, y])
        return self._add(self.s.n_embd * t, [self._view(self._norm(self._view(mixed)))])

    def _delta(self, b: Block, cur: Node) -> Node:
        """A gated delta net, and other linear attention in its likeness."""
        t, part = self.s.tokens, max(0, b.conv - b.inner) // 2
        mixed = self._view(self._add(b.mixer * t, [cur]))
        joined = self._add(b.conv * t, [mixed])
        self._add(0, [self._view(joined)])
        state = self._add(b.state, [])
        convolved = self._add(b.conv * t, [joined])
        convolved = self._add(b.conv * t, [convolved], in_place=True)
        qk = []
        for _ in range(2):
            normed = self._norm_of_part(self._view(convolved), part * t)
            qk.append(self._add(b.inner * t, [self._view(normed)]) if part != b.inner else normed)
        scanned = self._add(b.inner * t + b.state, [*qk, self._view(convolved), state])
        out = self._norm_of_part(self._view(scanned), b.inner * t)
        gate = self._add(b.inner * t, [self._view(self._add(b.inner * t, [cur]))])
        out = self._add(b.inner * t, [out, gate], in_place=True)
        return self._view(self._add(self.s.n_embd * t, [self._view(out)]))

    def _feed_forward(self, ff: int, cur: Node, n: int) -> Node:
        gate, up = self._add(ff * n, [cur]), self._add(ff * n, [cur])
        return self._add(self.s.n_embd * n, [self._add(ff * n, [gate, up])])

    def _experts(self, b: Block, cur: Node, n: int) -> Node:
        ff, n_embd = b.ff_expert * b.used * n, self.s.n_embd
        scores = self._add(b.n_experts * n, [cur])
        probabilities = self._add(b.n_experts * n, [scores], in_place=True)
        chosen = self._view(self._add(b.n_experts * n, [probabilities]))
        weights = self._view(self._add(b.used * n, [self._view(probabilities), chosen]))
        row = self._view(cur)
        if b.gate_up:
            both = self._add(2 * ff, [row, chosen])
            gate, up = self._view(both), self._view(both)
        else:
            gate, up = self._add(ff, [row, chosen]), self._add(ff, [row, chosen])
        active = self._add(ff, [gate, up])
        down = self._add(n_embd * b.used * n, [active, chosen])
        if b.expert_bias:
            down = self._add(n_embd * b.used * n, [down, chosen], in_place=True)
        weighted = self._add(n_embd * b.used * n, [down, weights], in_place=True)
        parts = [self._view(weighted) for _ in range(b.used)]
        total = parts[0]
        for part in parts[1:]:
            total = self._add(n_embd * n, [total, part], in_place=True)
        return total if b.used > 1 else self._add(n_embd * n, [total])
