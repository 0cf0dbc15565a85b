"""Small models of many architectures, written with the gguf package: shapes as llama.cpp wants them, weights zero.

Each builder gives the keys and the tensors (name -> shape, row first); `write_architecture` makes a file that llama.cpp
loads. They have no tokenizer (`no_vocab`), since nothing here decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

N_VOCAB = 2048
Shapes = dict[str, tuple[int, ...]]
Keys = dict[str, Any]


def outer(n_embd: int) -> Shapes:
    return {
        "token_embd.weight": (n_embd, N_VOCAB),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_embd, N_VOCAB),
    }


def attention(layer: int, n_embd: int, q: int, k: int, v: int) -> Shapes:
    p = f"blk.{layer}."
    return {
        p + "attn_norm.weight": (n_embd,),
        p + "attn_q.weight": (n_embd, q),
        p + "attn_k.weight": (n_embd, k),
        p + "attn_v.weight": (n_embd, v),
        p + "attn_output.weight": (q, n_embd),
    }


def experts(layer: int, n_embd: int, ff: int, n: int) -> Shapes:
    p = f"blk.{layer}.ffn_"
    return {
        p + "gate_inp.weight": (n_embd, n),
        p + "gate_exps.weight": (n_embd, ff, n),
        p + "up_exps.weight": (n_embd, ff, n),
        p + "down_exps.weight": (ff, n_embd, n),
    }


def mlp(layer: int, n_embd: int, ff: int, suffix: str = "") -> Shapes:
    p = f"blk.{layer}.ffn_"
    return {
        p + f"gate{suffix}.weight": (n_embd, ff),
        p + f"up{suffix}.weight": (n_embd, ff),
        p + f"down{suffix}.weight": (ff, n_embd),
    }


def base(n_layer: int, n_embd: int, ff: int, heads: int, heads_kv: Any) -> Keys:
    return {
        "block_count": n_layer,
        "context_length": 32768,
        "embedding_length": n_embd,
        "feed_forward_length": ff,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": N_VOCAB,
    }


def llama() -> tuple[Keys, Shapes]:
    """Mixtral: experts in every layer, GQA 16:4."""
    keys = base(4, 512, 256, 16, 4) | {"expert_count": 8, "expert_used_count": 2, "rope.dimension_count": 32}
    shapes = outer(512)
    for i in range(4):
        shapes |= attention(i, 512, 512, 128, 128) | {f"blk.{i}.ffn_norm.weight": (512,)} | experts(i, 512, 256, 8)
    return keys, shapes


def qwen2moe() -> tuple[Keys, Shapes]:
    keys = base(4, 512, 1024, 8, 8) | {
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_feed_forward_length": 128,
        "expert_shared_feed_forward_length": 512,
    }
    shapes = outer(512)
    for i in range(4):
        shapes |= attention(i, 512, 512, 512, 512) | {f"blk.{i}.ffn_norm.weight": (512,)}
        shapes |= experts(i, 512, 128, 16) | mlp(i, 512, 512, "_shexp")
        shapes[f"blk.{i}.ffn_gate_inp_shexp.weight"] = (512,)
    return keys, shapes


def qwen3moe() -> tuple[Keys, Shapes]:
    keys = base(6, 512, 1024, 16, 2) | {
        "attention.key_length": 64,
        "attention.value_length": 64,
        "expert_count": 32,
        "expert_used_count": 8,
        "expert_feed_forward_length": 96,
    }
    shapes = outer(512)
    for i in range(6):
        shapes |= attention(i, 512, 1024, 128, 128) | experts(i, 512, 96, 32)
        shapes |= {f"blk.{i}.attn_{n}_norm.weight": (64,) for n in "qk"} | {f"blk.{i}.ffn_norm.weight": (512,)}
    return keys, shapes


def olmoe() -> tuple[Keys, Shapes]:
    keys = base(3, 512, 128, 8, 8) | {"expert_count": 16, "expert_used_count": 4}
    shapes = outer(512)
    for i in range(3):
        shapes |= attention(i, 512, 512, 512, 512) | experts(i, 512, 128, 16)
        shapes |= {f"blk.{i}.attn_{n}_norm.weight": (512,) for n in "qk"} | {f"blk.{i}.ffn_norm.weight": (512,)}
    return keys, shapes


def gpt_oss() -> tuple[Keys, Shapes]:
    """Every second layer has a window of 128 tokens; experts and router have biases."""
    keys = base(6, 512, 256, 16, 4) | {
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.sliding_window": 128,
        "rope.dimension_count": 64,
        "expert_count": 8,
        "expert_used_count": 4,
        "expert_feed_forward_length": 256,
    }
    shapes = outer(512)
    for i in range(6):
        p = f"blk.{i}."
        shapes |= attention(i, 512, 1024, 256, 256) | experts(i, 512, 256, 8)
        shapes |= {
            p + "post_attention_norm.weight": (512,),
            p + "attn_sinks.weight": (16,),
            p + "attn_output.bias": (512,),
            p + "ffn_gate_inp.bias": (8,),
            p + "ffn_gate_exps.bias": (256, 8),
            p + "ffn_up_exps.bias": (256, 8),
            p + "ffn_down_exps.bias": (512, 8),
        }
    return keys, shapes


def deepseek2() -> tuple[Keys, Shapes]:
    """Multi-head latent attention, 512 + 64 a token; one leading dense layer; a shared expert."""
    keys = base(4, 512, 1024, 8, 1) | {
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.q_lora_rank": 256,
        "attention.kv_lora_rank": 512,
        "rope.dimension_count": 64,
        "leading_dense_block_count": 1,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 128,
    }
    shapes = outer(512)
    for i in range(4):
        p = f"blk.{i}."
        shapes |= {
            p + "attn_norm.weight": (512,),
            p + "attn_q_a_norm.weight": (256,),
            p + "attn_kv_a_norm.weight": (512,),
            p + "attn_q_a.weight": (512, 256),
            p + "attn_q_b.weight": (256, 8 * 192),
            p + "attn_kv_a_mqa.weight": (512, 576),
            p + "attn_k_b.weight": (128, 512, 8),
            p + "attn_v_b.weight": (512, 128, 8),
            p + "attn_output.weight": (8 * 128, 512),
            p + "ffn_norm.weight": (512,),
        }
        if i == 0:
            shapes |= mlp(i, 512, 1024)
        else:
            shapes |= experts(i, 512, 128, 16) | mlp(i, 512, 128, "_shexp") | {p + "exp_probs_b.bias": (16,)}
    return keys, shapes


def deepseek32() -> tuple[Keys, Shapes]:
    """Latent attention that looks at the 256 tokens which an indexer of 4 heads chose."""
    keys, shapes = deepseek2()
    keys |= {
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 256,
        "expert_gating_func": 2,
    }
    for i in range(4):
        p = f"blk.{i}.indexer."
        shapes |= {
            p + "k_norm.weight": (128,),
            p + "k_norm.bias": (128,),
            p + "proj.weight": (512, 4),
            p + "attn_k.weight": (512, 128),
            p + "attn_q_b.weight": (256, 4 * 128),
        }
    return keys, shapes


def glm4moe() -> tuple[Keys, Shapes]:
    """A leading dense layer and a block of multi-token prediction behind the trunk."""
    keys = base(5, 512, 1024, 16, 2) | {
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 32,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 1,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 128,
    }
    shapes = outer(512)
    for i in range(5):
        p = f"blk.{i}."
        shapes |= attention(i, 512, 1024, 128, 128) | {p + "post_attention_norm.weight": (512,)}
        if i == 0:
            shapes |= mlp(i, 512, 1024)
        else:
            shapes |= experts(i, 512, 128, 16) | mlp(i, 512, 128, "_shexp") | {p + "exp_probs_b.bias": (16,)}
    shapes |= {
        "blk.4.nextn.eh_proj.weight": (1024, 512),
        "blk.4.nextn.enorm.weight": (512,),
        "blk.4.nextn.hnorm.weight": (512,),
    }
    return keys, shapes


def gemma3() -> tuple[Keys, Shapes]:
    """Dense; five layers with a window, then one without; no output tensor."""
    keys = base(12, 512, 1024, 8, 4) | {
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 512,
    }
    shapes = outer(512)
    del shapes["output.weight"]
    for i in range(12):
        p = f"blk.{i}."
        shapes |= attention(i, 512, 1024, 512, 512) | mlp(i, 512, 1024)
        shapes |= {p + f"{n}.weight": (512,) for n in ("post_attention_norm", "ffn_norm", "post_ffw_norm")}
        shapes |= {p + f"attn_{n}_norm.weight": (128,) for n in "qk"}
    return keys, shapes


def gemma4() -> tuple[Keys, Shapes]:
    """Experts beside a dense feed-forward, gate and up in one; other heads in windowed layers; tied output."""
    keys = base(6, 512, 256, 8, [4, 4, 2] * 2) | {
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.key_length_swa": 64,
        "attention.value_length_swa": 64,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [True, True, False] * 2,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope.freq_base_swa": 10000.0,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_feed_forward_length": 96,
    }
    shapes = outer(512)
    del shapes["output.weight"]
    shapes["rope_freqs.weight"] = (64,)
    for i in range(6):
        p = f"blk.{i}."
        head, kv = (64, 4) if i % 3 < 2 else (128, 2)
        shapes |= attention(i, 512, 8 * head, kv * head, kv * head) | mlp(i, 512, 256)
        shapes |= {p + f"attn_{n}_norm.weight": (head,) for n in "qk"}
        norms = (
            "post_attention_norm",
            "ffn_norm",
            "post_ffw_norm",
            "pre_ffw_norm_2",
            "post_ffw_norm_1",
            "post_ffw_norm_2",
        )
        shapes |= {p + f"{n}.weight": (512,) for n in norms}
        shapes |= {
            p + "ffn_gate_inp.weight": (512, 16),
            p + "ffn_gate_inp.scale": (512,),
            p + "ffn_gate_up_exps.weight": (512, 192, 16),
            p + "ffn_down_exps.weight": (96, 512, 16),
        }
    return keys, shapes


ARCHITECTURES: dict[str, tuple[str, Callable[[], tuple[Keys, Shapes]]]] = {
    "llama": ("llama", llama),
    "qwen2moe": ("qwen2moe", qwen2moe),
    "qwen3moe": ("qwen3moe", qwen3moe),
    "olmoe": ("olmoe", olmoe),
    "gpt-oss": ("gpt-oss", gpt_oss),
    "deepseek2": ("deepseek2", deepseek2),
    "deepseek32": ("deepseek32", deepseek32),
    "glm4moe": ("glm4moe", glm4moe),
    "gemma4": ("gemma4", gemma4),
    "gemma3": ("gemma3", gemma3),
}


def write_architecture(name: str, path: Path) -> Path:
    """Write the named model with weights of zero: matrices F16, vectors F32."""
    import gguf
    import numpy as np
    from model_hybrids import HYBRIDS

    arch, build = (ARCHITECTURES | HYBRIDS)[name]
    keys, shapes = build()
    w = gguf.GGUFWriter(path, arch)
    w.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in keys.items():
        full = f"{arch}.{key}"
        if isinstance(value, list):
            w.add_array(full, value)
        elif isinstance(value, float):
            w.add_float32(full, value)
        else:
            w.add_uint32(full, value)
    for tensor, shape in shapes.items():
        small = len(shape) == 1 or (".ssm_" in tensor and "ssm_in" not in tensor and "ssm_out" not in tensor)
        small = small or "shortconv.conv." in tensor or tensor.endswith((".bias", ".scale", "gate_inp.weight"))
        w.add_tensor(tensor, np.zeros(shape[::-1], np.float32 if small else np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
