"""What each layer of the trunk remembers of a conversation: keys and values, a window of them, or a recurrent state.

Widths are elements, read from the architecture's keys as llama.cpp reads them. Not here: bytes for a context of a given
length (`memory`), compute buffers (`compute`).

The form of a layer, first rule that applies:
1. Purely recurrent architectures (Mamba, RWKV): a state in every layer.
2. Hybrids that alternate by number: all but each `full_attention_interval`-th layer are recurrent.
3. Hybrids that say so by head_count_kv: 0 is recurrent (Nemotron-H: where it has no feed-forward either).
4. Layers that share another layer's cache (Gemma 3n and 4) and those with head_count_kv 0 keep nothing.
5. Architectures with a sliding window: a pattern by layer from the file, else the architecture's period.
6. All else keeps every token. Multi-head latent attention keeps the compressed key alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from expertd.model.gguf import GgufModel

MAX_LAYERS = 1024


class Form(StrEnum):
    """What a layer keeps. BOTH is attention and a state side by side (Falcon-H1)."""

    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"
    BOTH = "both"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Elements of one layer. `k`, `v` and `index` (a sparse attention's indexer) are a token; `state` is one F32 block.

    `compressed` are further keys, one for `ratio` tokens, as DeepSeek-V4 keeps them behind its window.
    """

    form: Form
    k: int = 0
    v: int = 0
    index: int = 0
    state: int = 0
    compressed: int = 0
    ratio: int = 1


@dataclass(frozen=True, slots=True)
class Attention:
    """All layers of the trunk. `window` is in tokens, 0 where no layer has one; `n_head` is the largest of a layer."""

    layers: tuple[LayerMemory, ...]
    window: int
    n_head: int
    latent: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Window:
    """An architecture's own rule: one layer of each `period` sees all, the last or, `full_first`, the first."""

    period: int
    full_first: bool = False
    tokens: int = 0
    forced: bool = False


# From load_arch_hparams of each architecture, llama.cpp of late 2026. Others have no window even if a key names one.
_WINDOWS = {
    "afmoe": _Window(4),
    "cohere2": _Window(4),
    "cohere2moe": _Window(4, full_first=True),
    "exaone-moe": _Window(4, tokens=128),
    "gemma-embedding": _Window(6),
    "gemma2": _Window(2, tokens=4096),
    "gemma3": _Window(6),
    "gemma3n": _Window(5),
    "gpt-oss": _Window(2),
    "laguna": _Window(4, full_first=True),
    "llama4": _Window(4, tokens=8192, forced=True),
    "mellum": _Window(4),
    "muse-glimmer": _Window(4),
    "olmo2": _Window(4),
    "plamo3": _Window(8),
    "smallthinker": _Window(4, full_first=True, tokens=4096, forced=True),
}
_WINDOWS_BY_LAYER = {"gemma4", "granite_swa", "maple", "mimo2", "spark2_5", "step35", "dots3note"}
_EVERY_LAYER_WINDOWED = {"deepseek4"}
_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
_HYBRID_BY_HEADS = {
    "jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next",
    "nemotron_h", "nemotron_h_moe",
}  # fmt: skip
_INDEXED = {"deepseek32", "glm-dsa", "hy_v4", "dots3note", "minimax-m3", "qwen4exp", "glm5-next"}


def read_attention(model: GgufModel, n_layers: int) -> Attention:
    """The memory of each of `n_layers` trunk layers. Never raises: what the keys leave open is in `notes`."""
    n_layers = min(n_layers, MAX_LAYERS)
    heads = model.integers("attention.head_count", n_layers)
    heads_kv = _heads_kv(model, n_layers, heads)
    windowed, window = _windowed(model, n_layers)
    recurrent = _recurrent(model, n_layers, heads_kv)
    latent = bool(model.integer("attention.key_length_mla") and model.integer("attention.value_length_mla"))
    if model.arch in _EVERY_LAYER_WINDOWED:
        latent = True
    state = _state(model, heads[0] if heads else 0)
    widths = _Widths(model, heads)
    layers = [
        _layer(model, i, heads_kv[i], windowed[i], recurrent[i], latent, state, widths, n_layers)
        for i in range(n_layers)
    ]
    return Attention(tuple(layers), window, max(heads, default=0), latent, _notes(model, layers))


def _layer(
    model: GgufModel,
    i: int,
    heads_kv: int,
    windowed: bool,
    recurrent: bool,
    latent: bool,
    state: int,
    widths: _Widths,
    n_layers: int,
) -> LayerMemory:
    k, v = widths.of(windowed)
    if recurrent and model.arch != "falcon-h1":
        return LayerMemory(Form.RECURRENT, state=state)
    if not heads_kv or _shares_cache(model, i, n_layers) or _feed_forward_only(model, i):
        return LayerMemory(Form.NONE)
    form = Form.WINDOW if windowed else Form.BOTH if recurrent else Form.FULL
    compressed, ratio = _compressed(model, i, k * heads_kv)
    return LayerMemory(
        form,
        k=k * heads_kv,
        v=0 if latent else v * heads_kv,
        index=_index_width(model, i, latent, v),
        state=state if recurrent else _compressor_state(model, ratio, k),
        compressed=compressed,
        ratio=ratio,
    )


class _Widths:
    """Elements of one head's key and value, with and without a window."""

    def __init__(self, model: GgufModel, heads: list[int]) -> None:
        default = (model.integer("embedding_length") or 0) // heads[0] if heads and heads[0] else 0
        self.k = _given(model, "attention.key_length", default)
        self.v = _given(model, "attention.value_length", default)
        self.k_window = _given(model, "attention.key_length_swa", self.k)
        self.v_window = _given(model, "attention.value_length_swa", self.v)

    def of(self, windowed: bool) -> tuple[int, int]:
        return (self.k_window, self.v_window) if windowed else (self.k, self.v)


def _given(model: GgufModel, key: str, default: int) -> int:
    found = model.integer(key)
    return default if found is None else max(0, found)


def _heads_kv(model: GgufModel, n_layers: int, heads: list[int]) -> list[int]:
    if model.key("attention.head_count_kv") is None:
        return heads
    return [max(0, n) for n in model.integers("attention.head_count_kv", n_layers)]


def _windowed(model: GgufModel, n_layers: int) -> tuple[list[bool], int]:
    """Which layers see a window only, and its tokens."""
    none = [False] * n_layers
    tokens = max(0, model.integer("attention.sliding_window") or 0)
    if model.arch in _EVERY_LAYER_WINDOWED:
        return [True] * n_layers, tokens
    rule = _WINDOWS.get(model.arch)
    if model.arch == "exaone4" and n_layers == 64:
        rule = _Window(4, tokens=4096)
    if model.arch in ("lfm2", "lfm2moe") and tokens:
        return [n > 0 for n in model.integers("attention.head_count_kv", n_layers)], tokens
    pattern = model.key("attention.sliding_window_pattern")
    if model.arch in _WINDOWS_BY_LAYER:
        rule = rule or _Window(0)
        if not isinstance(pattern, tuple):
            return none, 0
    if rule is None:
        return none, 0
    switched_off = model.key("attention.sliding_window") == 0
    if rule.forced:
        tokens = 0 if switched_off or (not tokens and model.arch == "smallthinker") else rule.tokens
    elif not tokens and not switched_off:
        tokens = rule.tokens
    if not tokens:
        return none, 0
    if isinstance(pattern, tuple):
        flags = [bool(p) for p in pattern[:n_layers]]
        return flags + [False] * (n_layers - len(flags)), tokens
    period = pattern if isinstance(pattern, int) and pattern >= 0 else rule.period
    if period == 0:
        return [True] * n_layers, tokens
    last = 0 if rule.full_first else period - 1
    return [i % period != last for i in range(n_layers)], tokens


def _recurrent(model: GgufModel, n_layers: int, heads_kv: list[int]) -> list[bool]:
    if model.arch in _RECURRENT or model.arch == "falcon-h1":
        return [True] * n_layers
    if model.arch in _INTERVAL:
        flags = model.key("attention.recurrent_layers")
        if isinstance(flags, tuple):
            return [bool(f) for f in flags[:n_layers]] + [False] * max(0, n_layers - len(flags))
        interval = model.integer("full_attention_interval") or _INTERVAL[model.arch]
        return [(i + 1) % interval != 0 for i in range(n_layers)]
    if model.arch in _HYBRID_BY_HEADS:
        feed_forward = model.integers("feed_forward_length", n_layers)
        nemotron = model.arch.startswith("nemotron")
        return [heads_kv[i] == 0 and not (nemotron and feed_forward[i]) for i in range(n_layers)]
    return [False] * n_layers


def _feed_forward_only(model: GgufModel, i: int) -> bool:
    """Nemotron-H: a block is a mixer or a feed-forward, never both."""
    return model.arch.startswith("nemotron_h") and model.integers("feed_forward_length", i + 1)[i] > 0


def _shares_cache(model: GgufModel, i: int, n_layers: int) -> bool:
    if model.arch == "gemma3n":
        return i >= 20
    if model.arch == "gemma4":
        return i >= n_layers - (model.integer("attention.shared_kv_layers") or 0)
    return False


def _state(model: GgufModel, n_head: int) -> int:
    """F32 elements of a recurrent layer: what the convolution still needs, and the state itself."""
    n_embd = model.integer("embedding_length") or 0
    conv = model.integer("ssm.conv_kernel") or 0
    if head := model.integer("wkv.head_size"):
        return n_embd * ((model.integer("token_shift_count") or 0) + head)
    if cache := model.integer("shortconv.l_cache"):
        return n_embd * (cache - 1)
    if head := model.integer("kda.head_dim"):
        return 3 * (conv - 1 if conv else 3) * n_head * head + head * head * n_head
    if model.arch == "minimax-01":
        head = model.integer("attention.key_length") or (n_embd // n_head if n_head else 0)
        return head * head * n_head
    inner, size = model.integer("ssm.inner_size") or 0, model.integer("ssm.state_size") or 0
    groups = model.integer("ssm.group_count") or 0
    return max(0, conv - 1) * (inner + 2 * groups * size) + inner * size


def _index_width(model: GgufModel, i: int, latent: bool, v: int) -> int:
    """Elements a token of a sparse attention's indexer. Where values are cached, it has an unused one too."""
    width = model.integer("attention.indexer.key_length") or 0
    if model.arch not in _INDEXED or not width:
        return 0
    if model.arch == "minimax-m3":
        return width + v if i >= (model.integer("leading_dense_block_count") or 0) else 0
    types = model.key("attention.indexer.types")
    if isinstance(types, tuple) and i < len(types) and not types[i]:
        return 0
    if model.arch == "glm5-next" and model.integer("attention.indexer.kpool"):
        width *= 3
    return width


def _compressed(model: GgufModel, i: int, k: int) -> tuple[int, int]:
    """DeepSeek-V4: further elements for each `ratio` tokens; at ratio 4 the indexer's keys are among them."""
    ratios = model.key("attention.compress_ratios")
    ratio = ratios[i] if isinstance(ratios, tuple) and i < len(ratios) else 0
    if model.arch != "deepseek4" or not isinstance(ratio, int) or ratio <= 0:
        return 0, 1
    return k + ((model.integer("attention.indexer.key_length") or 0) if ratio == 4 else 0), ratio


def _compressor_state(model: GgufModel, ratio: int, k: int) -> int:
    """F32 elements of DeepSeek-V4's compressors: a block under way and its scores, doubled where blocks overlap."""
    if model.arch != "deepseek4" or ratio == 1:
        return 0
    if ratio == 4:
        return 2 * (2 * ratio) * 2 * (k + (model.integer("attention.indexer.key_length") or 0))
    return 2 * ratio * k


def _notes(model: GgufModel, layers: list[LayerMemory]) -> tuple[str, ...]:
    notes = []
    if not any(m.k or m.state for m in layers):
        notes.append("the header does not say what attention the model has: its KV cache cannot be sized")
    if model.arch == "glm-dsa" and model.key("attention.indexer.types") is None:
        notes.append("indexer layers are not named in the header: a key for each layer is counted")
    if model.arch == "nanbeige" and (model.integer("num_loops") or 1) > 1:
        notes.append("layers are run in loops: the KV cache is as many times larger")
    return tuple(notes)
