"""Small models whose layers are recurrent but for some: the second half of `model_architectures`."""

from __future__ import annotations

from collections.abc import Callable

from model_architectures import Keys, Shapes, attention, base, experts, mlp, outer


def qwen3next() -> tuple[Keys, Shapes]:
    """Three gated delta nets, then one full attention: full_attention_interval 4."""
    keys = base(8, 512, 1024, 8, 2) | {
        "attention.key_length": 64,
        "attention.value_length": 64,
        "full_attention_interval": 4,
        "rope.dimension_count": 16,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 512,
        "ssm.state_size": 64,
        "ssm.time_step_rank": 8,
        "ssm.group_count": 4,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_feed_forward_length": 128,
        "expert_shared_feed_forward_length": 128,
    }
    shapes = outer(512)
    for i in range(8):
        p = f"blk.{i}."
        shapes |= {p + "attn_norm.weight": (512,), p + "post_attention_norm.weight": (512,)}
        if i % 4 == 3:
            shapes |= attention(i, 512, 1024, 128, 128) | {p + "attn_output.weight": (512, 512)}
            shapes |= {p + f"attn_{n}_norm.weight": (64,) for n in "qk"}
        else:
            shapes |= {
                p + "attn_qkv.weight": (512, 1024),
                p + "attn_gate.weight": (512, 512),
                p + "ssm_conv1d.weight": (4, 1024),
                p + "ssm_dt.bias": (8,),
                p + "ssm_a": (8,),
                p + "ssm_ba.weight": (512, 16),
                p + "ssm_norm.weight": (64,),
                p + "ssm_out.weight": (512, 512),
            }
        shapes |= experts(i, 512, 128, 16) | mlp(i, 512, 128, "_shexp")
        shapes[p + "ffn_gate_inp_shexp.weight"] = (512,)
    return keys, shapes


def granitehybrid() -> tuple[Keys, Shapes]:
    """Mamba-2 where head_count_kv is 0, attention elsewhere."""
    keys = base(6, 512, 128, 8, [0, 0, 2, 0, 0, 2]) | {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 1024,
        "ssm.state_size": 64,
        "ssm.time_step_rank": 16,
        "ssm.group_count": 1,
        "rope.dimension_count": 64,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_feed_forward_length": 128,
    }
    shapes = outer(512)
    for i in range(6):
        p = f"blk.{i}."
        if i % 3 == 2:
            shapes |= attention(i, 512, 512, 128, 128)
        else:
            shapes |= {
                p + "attn_norm.weight": (512,),
                p + "ssm_in.weight": (512, 2 * 1024 + 2 * 64 + 16),
                p + "ssm_conv1d.weight": (4, 1024 + 128),
                p + "ssm_conv1d.bias": (1024 + 128,),
                p + "ssm_dt.bias": (16,),
                p + "ssm_a": (1, 16),
                p + "ssm_d": (1, 16),
                p + "ssm_norm.weight": (1024, 1),
                p + "ssm_out.weight": (1024, 512),
            }
        shapes |= {p + "ffn_norm.weight": (512,)} | experts(i, 512, 128, 8) | mlp(i, 512, 128, "_shexp")
    return keys, shapes


def nemotron_h_moe() -> tuple[Keys, Shapes]:
    """A block is a Mamba-2, an attention or a mixture of experts without gates."""
    kinds = ("m", "e", "a", "e", "m", "e")
    keys = base(6, 512, 0, 8, [2 if k == "a" else 0 for k in kinds]) | {
        "feed_forward_length": [256 if k == "e" else 0 for k in kinds],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.layer_norm_epsilon": 1e-5,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 1024,
        "ssm.state_size": 64,
        "ssm.time_step_rank": 16,
        "ssm.group_count": 2,
        "rope.dimension_count": 64,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_feed_forward_length": 128,
        "expert_shared_feed_forward_length": 256,
        "expert_shared_count": 1,
    }
    shapes = outer(512)
    for i, kind in enumerate(kinds):
        p = f"blk.{i}."
        shapes[p + "attn_norm.weight"] = (512,)
        if kind == "a":
            shapes |= attention(i, 512, 512, 128, 128)
        elif kind == "m":
            shapes |= {
                p + "ssm_in.weight": (512, 2 * 1024 + 4 * 64 + 16),
                p + "ssm_conv1d.weight": (4, 1024 + 256),
                p + "ssm_conv1d.bias": (1024 + 256,),
                p + "ssm_dt.bias": (16,),
                p + "ssm_a": (1, 16),
                p + "ssm_d": (1, 16),
                p + "ssm_norm.weight": (512, 2),
                p + "ssm_out.weight": (1024, 512),
            }
        else:
            mixed = experts(i, 512, 128, 16) | mlp(i, 512, 256, "_shexp") | {p + "exp_probs_b.bias": (16,)}
            shapes |= {name: s for name, s in mixed.items() if "gate_exps" not in name and "gate_shexp" not in name}
    return keys, shapes


def lfm2moe() -> tuple[Keys, Shapes]:
    """Short convolutions where head_count_kv is 0; one leading dense layer."""
    heads = [0, 0, 2, 0, 0, 2]
    keys = base(6, 512, 1024, 8, heads) | {
        "shortconv.l_cache": 3,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "rope.dimension_count": 64,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_feed_forward_length": 128,
    }
    shapes = outer(512)
    del shapes["output_norm.weight"]
    shapes["token_embd_norm.weight"] = (512,)
    for i, kv in enumerate(heads):
        p = f"blk.{i}."
        shapes |= {p + "attn_norm.weight": (512,), p + "ffn_norm.weight": (512,)}
        if kv:
            shapes |= attention(i, 512, 512, 128, 128) | {p + f"attn_{n}_norm.weight": (64,) for n in "qk"}
        else:
            shapes |= {
                p + "shortconv.conv.weight": (3, 512),
                p + "shortconv.in_proj.weight": (512, 3 * 512),
                p + "shortconv.out_proj.weight": (512, 512),
            }
        shapes |= experts(i, 512, 128, 16) | {p + "exp_probs_b.bias": (16,)} if i else mlp(i, 512, 1024)
    return keys, shapes


HYBRIDS: dict[str, tuple[str, Callable[[], tuple[Keys, Shapes]]]] = {
    "qwen3next": ("qwen3next", qwen3next),
    "granitehybrid": ("granitehybrid", granitehybrid),
    "nemotron_h_moe": ("nemotron_h_moe", nemotron_h_moe),
    "lfm2moe": ("lfm2moe", lfm2moe),
}
