"""What a tensor is, by its name alone.

Not here: shapes and bytes (`expertmap`). Names are those of llama.cpp's LLM_TENSOR_NAMES.

1. Blocks behind the trunk, and `nextn.*` anywhere, belong to multi-token prediction.
2. `ffn_{gate,up,down,gate_up}_exps.weight` holds a layer's experts; `ffn_{gate,up,down}.N.weight` one expert, as in
   files of before April 2024.
3. Anything else of `_exps` (bias, scale) is small and read with every token.
4. `_chexps`: GroveMoE's adjugate experts, each shared by a group of experts, so no expert owns their bytes.
5. The router, its bias and the shared expert's gate. 6. `_shexp`: shared experts, used by every token.
7. Tables of which a token reads one row. 8. The families that llama.cpp knows are dense; the rest is unknown.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Role(StrEnum):
    """The bucket of a tensor. All but EXPERT, NEXTN and UNKNOWN are dense."""

    EXPERT = "expert"
    EXPERT_BIAS = "expert_bias"
    GROUP_EXPERT = "group_expert"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    EMBEDDING = "embedding"
    DENSE = "dense"
    NEXTN = "nextn"
    UNKNOWN = "unknown"


_BLOCK = re.compile(r"blk\.(\d{1,3})\.(.+)", re.DOTALL)
_STACKED = re.compile(r"ffn_(gate_up|gate|up|down)_exps\.weight")
_SINGLE = re.compile(r"ffn_(gate|up|down)\.(\d{1,4})\.(weight|bias)")
_BLOCK_FAMILIES = re.compile(
    r"(attn|ffn|ssm|hc|ple|altup|laurel|indexer|vis|shortconv|time_mix|channel_mix|cross_attn|layer_output|inp_gate|proj|"
    r"post_attention_norm|post_ffw_norm|pre_ffw_norm|post_norm)(?![a-z])"
)
_GLOBAL_FAMILIES = re.compile(
    r"(output|token_embd_norm|token_types|rope_freqs|rope_factors|per_layer|altup|cls|enc|dec|dense_[23]|conv1d|convnext|"
    r"posnet|hrm|masked_embd|fc|d2t|markov|conf_proj|selector|resampler|a|v|mm|s)(?![a-z])"
)
_TABLES = ("token_embd.", "position_embd.", "per_layer_token_embd.", "token_types.")


def block_of(name: str) -> int | None:
    """The block index in a tensor's name, None for a tensor outside the blocks."""
    found = _BLOCK.match(name)
    return int(found[1]) if found else None


def stacked_expert(name: str) -> tuple[int, str] | None:
    """(layer, role) of a tensor that stacks a layer's experts."""
    found = _BLOCK.match(name)
    inner = _STACKED.fullmatch(found[2]) if found else None
    return (int(found[1]), inner[1]) if found and inner else None


def single_expert(name: str) -> tuple[int, int, str] | None:
    """(layer, index, role) of a tensor that holds one expert: the layout of before stacking."""
    found = _BLOCK.match(name)
    inner = _SINGLE.fullmatch(found[2]) if found else None
    return (int(found[1]), int(inner[2]), inner[1]) if found and inner and inner[3] == "weight" else None


def role_of(name: str, n_trunk: int, n_blocks: int) -> Role:
    """The bucket of a tensor, where blocks from `n_trunk` to `n_blocks` are multi-token prediction."""
    found = _BLOCK.match(name)
    if found is None:
        return _global_role(name)
    layer, rest = int(found[1]), found[2]
    if layer >= n_blocks:
        return Role.UNKNOWN
    if layer >= n_trunk or rest.startswith("nextn."):
        return Role.NEXTN
    single = _SINGLE.fullmatch(rest)
    if _STACKED.fullmatch(rest) or (single and single[3] == "weight"):
        return Role.EXPERT
    stem = rest.split(".")[0]
    if single or (stem.endswith("_exps") and stem != "ffn_norm_exps"):
        return Role.EXPERT_BIAS
    if stem.endswith("_chexps"):
        return Role.GROUP_EXPERT
    if stem.startswith(("ffn_gate_inp", "exp_probs_b", "ffn_gate_tid2eid")):
        return Role.ROUTER
    if stem.endswith("_shexp"):
        return Role.SHARED_EXPERT
    return Role.DENSE if _BLOCK_FAMILIES.match(rest) else Role.UNKNOWN


def _global_role(name: str) -> Role:
    if name.startswith("nextn."):
        return Role.NEXTN
    if name.startswith(_TABLES):
        return Role.EMBEDDING
    return Role.DENSE if _GLOBAL_FAMILIES.match(name) else Role.UNKNOWN
