"""Geometries of well-known models, from their published configurations. Types are those of the usual 4-bit file.

Sizes come out within a few percent of the published GGUF files: those mix types by layer, these do not.
"""

from __future__ import annotations

from expertd.bench.geometry import Geometry
from expertd.errors import UsageError

_SIGMOID = 2
_GLM = {"expert_gating_func": _SIGMOID, "expert_weights_scale": 1.0, "expert_weights_norm": True}
_DEEPSEEK_V3 = {
    "expert_gating_func": _SIGMOID,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_group_count": 8,
    "expert_group_used_count": 4,
}

PRESETS: dict[str, Geometry] = {
    g.name: g
    for g in (
        Geometry("olmoe-1b-7b", "olmoe", 16, 64, 8, 2048, 1024, 16, 16, 128, 50304),
        Geometry("qwen3-30b-a3b", "qwen3moe", 48, 128, 8, 2048, 768, 32, 4, 128, 151936),
        Geometry("qwen3-235b-a22b", "qwen3moe", 94, 128, 8, 4096, 1536, 64, 4, 128, 151936),
        Geometry("qwen3-coder-480b-a35b", "qwen3moe", 62, 160, 8, 6144, 2560, 96, 8, 128, 151936),
        Geometry("mixtral-8x7b", "llama", 32, 8, 2, 4096, 14336, 32, 8, 128, 32000),
        Geometry("mixtral-8x22b", "llama", 56, 8, 2, 6144, 16384, 48, 8, 128, 32768),
        Geometry(
            "gpt-oss-20b", "gpt-oss", 24, 32, 4, 2880, 2880, 64, 8, 64, 201088,
            expert_type="MXFP4", dense_type="Q8_0", output_type="Q8_0", keys={"attention.sliding_window": 128},
        ),
        Geometry(
            "gpt-oss-120b", "gpt-oss", 36, 128, 4, 2880, 2880, 64, 8, 64, 201088,
            expert_type="MXFP4", dense_type="Q8_0", output_type="Q8_0", keys={"attention.sliding_window": 128},
        ),
        Geometry(
            "glm-4.5-air", "glm4moe", 46, 128, 8, 4096, 1408, 96, 8, 128, 151552,
            dense_layers=1, dense_ff=10944, shared_experts=1, rope_dim=64, keys=_GLM,
        ),
        Geometry(
            "glm-4.5", "glm4moe", 92, 160, 8, 5120, 1536, 96, 8, 128, 151552,
            dense_layers=3, dense_ff=12288, shared_experts=1, rope_dim=64, keys=_GLM,
        ),
        Geometry(
            "minimax-m2", "minimax-m2", 62, 256, 8, 3072, 1536, 48, 8, 128, 200064,
            rope_dim=64, keys={"expert_gating_func": _SIGMOID},
        ),
        Geometry(
            "deepseek-v2-lite", "deepseek2", 27, 64, 6, 2048, 1408, 16, 1, 192, 102400,
            dense_layers=1, dense_ff=10944, shared_experts=2,
            kv_lora=512, rope_dim=64, nope_dim=128, value_dim=128, keys={"expert_weights_scale": 1.0},
        ),
        Geometry(
            "deepseek-v3", "deepseek2", 61, 256, 8, 7168, 2048, 128, 1, 192, 129280,
            dense_layers=3, dense_ff=18432, shared_experts=1,
            q_lora=1536, kv_lora=512, rope_dim=64, nope_dim=128, value_dim=128, keys=_DEEPSEEK_V3,
        ),
        Geometry(
            "kimi-k2", "deepseek2", 61, 384, 8, 7168, 2048, 64, 1, 192, 163840,
            dense_layers=1, dense_ff=18432, shared_experts=1,
            q_lora=1536, kv_lora=512, rope_dim=64, nope_dim=128, value_dim=128,
            keys={"expert_gating_func": _SIGMOID, "expert_weights_scale": 2.827, "expert_weights_norm": True},
        ),
    )
}  # fmt: skip


def preset(name: str) -> Geometry:
    """The geometry of that name. Raises UsageError with the known names."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise UsageError(f"no geometry {name}", hint=f"one of {', '.join(PRESETS)}, or a .json or .toml file") from None
