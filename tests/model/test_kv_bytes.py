"""KV bytes of every form of attention, to the byte. Figures are counted by hand in the comments."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_gguf_bytes import write

from expertd.errors import UsageError
from expertd.model.attention import Attention, Form, read_attention
from expertd.model.gguf import read_model
from expertd.model.memory import KvBytes, kv_nbytes, padded, row_nbytes


def attention(path: Path, arch: str, n_layers: int, **keys: object) -> Attention:
    """From a header alone: no tensor is needed for the cache."""
    entries = {f"{arch}.{k.replace('__', '.')}": v for k, v in keys.items()}
    model = read_model(write(path / "m.gguf", {"general.architecture": arch, **entries}, []))
    return read_attention(model, n_layers)


def forms(a: Attention) -> str:
    letters = {Form.FULL: "f", Form.WINDOW: "w", Form.RECURRENT: "r", Form.BOTH: "b", Form.NONE: "-"}
    return "".join(letters[m.form] for m in a.layers)


def test_grouped_queries(tmp_path: Path) -> None:
    a = attention(
        tmp_path, "qwen3moe", 48, attention__head_count=32, attention__head_count_kv=4, embedding_length=2048,
        attention__key_length=128, attention__value_length=128,
    )  # fmt: skip
    # 48 layers x (4 heads x 128 keys + as many values) x 2 bytes x 32768 tokens
    assert kv_nbytes(a, 32768, 512, "f16").total == 48 * 2 * 512 * 2 * 32768 == 3221225472
    # q8_0: 34 bytes for 32 elements
    assert kv_nbytes(a, 32768, 512, "q8_0").total == 48 * 2 * 512 // 32 * 34 * 32768 == 1711276032
    assert kv_nbytes(a, 32768, 512, "q4_0").total == 48 * 2 * 512 // 32 * 18 * 32768


def test_head_sizes_follow_from_the_embedding_when_not_given(tmp_path: Path) -> None:
    a = attention(tmp_path, "llama", 88, attention__head_count=96, attention__head_count_kv=8, embedding_length=12288)
    # 88 layers x 2 x 8 heads x 128 x 2 bytes
    assert kv_nbytes(a, 1024, 512, "f16").total == 88 * 2 * 8 * 128 * 2 * 1024 == 369098752
    alone = attention(tmp_path, "llama", 2, attention__head_count=32, embedding_length=4096)
    assert kv_nbytes(alone, 256, 256, "f16").total == 2 * 2 * 4096 * 2 * 256


def test_a_context_is_padded_to_256(tmp_path: Path) -> None:
    assert [padded(n) for n in (1, 256, 257, 4096)] == [256, 256, 512, 4096]
    a = attention(tmp_path, "llama", 1, attention__head_count=1, embedding_length=64)
    assert kv_nbytes(a, 1000, 512, "f16") == kv_nbytes(a, 1024, 512, "f16")


def test_heads_by_layer_with_zeros(tmp_path: Path) -> None:
    """A pruned model: layers without attention keep nothing."""
    a = attention(
        tmp_path, "deci", 4, attention__head_count=32, attention__head_count_kv=[8, 0, 4, 0], embedding_length=4096
    )
    assert forms(a) == "f-f-"
    assert kv_nbytes(a, 512, 512, "f16").layers == (2 * 1024 * 2 * 512, 0, 2 * 512 * 2 * 512, 0)


def test_recurrent_where_heads_are_zero(tmp_path: Path) -> None:
    a = attention(
        tmp_path, "granitehybrid", 4, attention__head_count=32, attention__head_count_kv=[0, 0, 8, 0],
        embedding_length=4096, ssm__conv_kernel=4, ssm__inner_size=8192, ssm__state_size=128, ssm__group_count=1,
    )  # fmt: skip
    assert forms(a) == "rrfr"
    kv = kv_nbytes(a, 8192, 512, "q8_0")
    # convolution: 3 x (8192 + 2 x 1 x 128), state: 128 x 8192, both F32 whatever the cache's type
    assert kv.state == 3 * 4 * (3 * (8192 + 256) + 128 * 8192)
    assert kv.full == 2 * 1024 // 32 * 34 * 8192


def test_every_fourth_layer_sees_all(tmp_path: Path) -> None:
    a = attention(
        tmp_path, "qwen3next", 48, attention__head_count=16, attention__head_count_kv=2, embedding_length=2048,
        attention__key_length=256, attention__value_length=256, full_attention_interval=4,
        ssm__conv_kernel=4, ssm__inner_size=4096, ssm__state_size=128, ssm__group_count=16,
    )  # fmt: skip
    assert forms(a) == "rrrf" * 12
    kv = kv_nbytes(a, 262144, 512, "f16")
    assert kv.full == 12 * 2 * 512 * 2 * 262144 == 6442450944
    assert kv.state == 36 * 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096) == 79036416


def test_every_second_layer_has_a_window(tmp_path: Path) -> None:
    a = attention(
        tmp_path, "gpt-oss", 36, attention__head_count=64, attention__head_count_kv=8, embedding_length=2880,
        attention__key_length=64, attention__value_length=64, attention__sliding_window=128,
    )  # fmt: skip
    assert forms(a) == "wf" * 18
    kv = kv_nbytes(a, 131072, 512, "f16")
    # a window's cache holds 128 + 512 tokens, padded to 768
    assert kv == KvBytes(18 * 2048 * 131072, 18 * 2048 * 768, 0, kv.layers)
    assert kv_nbytes(a, 256, 64, "f16").window == 18 * 2048 * 256
    assert kv_nbytes(a, 131072, 2048, "f16").window == 18 * 2048 * 2304


@pytest.mark.parametrize(
    ("arch", "keys", "expected"),
    [
        ("gemma3", {"attention__sliding_window": 1024}, "wwwwwfwwwwwf"),
        ("gemma3", {"attention__sliding_window": 1024, "attention__sliding_window_pattern": 2}, "wfwfwfwfwfwf"),
        ("gemma3", {}, "ffffffffffff"),
        ("gemma2", {}, "wfwfwfwfwfwf"),
        ("cohere2moe", {"attention__sliding_window": 4096}, "fwwwfwwwfwww"),
        ("smallthinker", {"attention__sliding_window": 99}, "fwwwfwwwfwww"),
        ("smallthinker", {}, "ffffffffffff"),
        ("llama4", {}, "wwwfwwwfwwwf"),
        ("llama4", {"attention__sliding_window": 0}, "ffffffffffff"),
        ("exaone-moe", {"attention__sliding_window": 128}, "wwwfwwwfwwwf"),
        ("mimo2", {"attention__sliding_window": 9, "attention__sliding_window_pattern": [True, False] * 6}, "wf" * 6),
        ("gpt-oss", {"attention__sliding_window": 128, "attention__sliding_window_pattern": [0] * 12}, "f" * 12),
        ("llama", {"attention__sliding_window": 4096}, "ffffffffffff"),
        ("phi3", {"attention__sliding_window": 2047}, "ffffffffffff"),
        ("deepseek4", {"attention__sliding_window": 128}, "w" * 12),
        ("mamba2", {}, "r" * 12),
        ("falcon-h1", {}, "b" * 12),
        ("minimax-01", {"attention__key_length": 128}, "rrrrrrrfrrrr"),
        ("qwen35moe", {"attention__recurrent_layers": [True, False] * 6}, "rfrfrfrfrfrf"),
        ("gemma4", {"attention__shared_kv_layers": 4}, "ffffffff----"),
    ],
)  # fmt: skip
def test_patterns_of_layers(tmp_path: Path, arch: str, keys: dict[str, object], expected: str) -> None:
    a = attention(tmp_path, arch, 12, attention__head_count=8, embedding_length=512, **keys)
    assert forms(a) == expected


def test_windows_that_the_architecture_fixes(tmp_path: Path) -> None:
    base = {"attention__head_count": 8, "embedding_length": 512}
    assert attention(tmp_path, "smallthinker", 4, attention__sliding_window=99, **base).window == 4096
    assert attention(tmp_path, "llama4", 4, **base).window == 8192
    assert attention(tmp_path, "gemma2", 4, **base).window == 4096
    assert attention(tmp_path, "gemma2", 4, attention__sliding_window=100, **base).window == 100


def test_windowed_layers_with_other_head_sizes(tmp_path: Path) -> None:
    a = attention(
        tmp_path, "gemma4", 2, attention__head_count=8, attention__head_count_kv=[8, 2], embedding_length=512,
        attention__key_length=512, attention__value_length=512, attention__key_length_swa=256,
        attention__value_length_swa=256, attention__sliding_window=1024,
        attention__sliding_window_pattern=[True, False],
    )  # fmt: skip
    kv = kv_nbytes(a, 32768, 512, "f16")
    assert (kv.window, kv.full) == (2 * 8 * 256 * 2 * 1536, 2 * 2 * 512 * 2 * 32768)


def test_latent_attention_keeps_the_compressed_key_alone(tmp_path: Path) -> None:
    a = attention(
        tmp_path, "deepseek2", 61, attention__head_count=128, attention__head_count_kv=1, embedding_length=7168,
        attention__key_length=576, attention__value_length=512, attention__key_length_mla=192,
        attention__value_length_mla=128, attention__kv_lora_rank=512,
    )  # fmt: skip
    assert a.latent
    # 61 layers x (512 + 64) x 2 bytes
    assert kv_nbytes(a, 4096, 512, "f16").total == 61 * 576 * 2 * 4096 == 287834112
    old = attention(
        tmp_path, "deepseek2", 61, attention__head_count=128, attention__head_count_kv=128, embedding_length=7168,
        attention__key_length=192, attention__value_length=128,
    )  # fmt: skip
    # A file of before the compressed layout: heads are kept whole.
    assert kv_nbytes(old, 4096, 512, "f16").total == 61 * 128 * (192 + 128) * 2 * 4096


def test_an_indexer_has_a_cache_of_its_own(tmp_path: Path) -> None:
    base = {
        "attention__head_count": 128, "attention__head_count_kv": 1, "attention__key_length": 576,
        "attention__value_length": 512, "attention__key_length_mla": 192, "attention__value_length_mla": 128,
        "attention__indexer__key_length": 128,
    }  # fmt: skip
    a = attention(tmp_path, "deepseek32", 3, **base)
    assert kv_nbytes(a, 1024, 512, "f16").layers == ((576 + 128) * 2 * 1024,) * 3
    shared = attention(tmp_path, "glm-dsa", 3, attention__indexer__types=[1, 0, 1], **base)
    assert [m.index for m in shared.layers] == [128, 0, 128]
    assert not shared.notes


def test_a_feed_forward_block_of_nemotron_keeps_nothing(tmp_path: Path) -> None:
    """88 blocks, each a state, an attention or a feed-forward."""
    pattern = ("m", "f", "a", "f") * 22
    a = attention(
        tmp_path, "nemotron_h_moe", 88, attention__head_count=32, embedding_length=4096, attention__key_length=128,
        attention__value_length=128, attention__head_count_kv=[2 if p == "a" else 0 for p in pattern],
        feed_forward_length=[1024 if p == "f" else 0 for p in pattern], ssm__conv_kernel=4, ssm__inner_size=8192,
        ssm__state_size=128, ssm__group_count=8,
    )  # fmt: skip
    assert forms(a) == "r-f-" * 22
    kv = kv_nbytes(a, 4096, 512, "f16")
    assert kv.full == 22 * 2 * 256 * 2 * 4096
    assert kv.state == 22 * 4 * (3 * (8192 + 2 * 8 * 128) + 128 * 8192)


@pytest.mark.parametrize(
    ("arch", "keys", "elements"),
    [
        ("lfm2moe", {"shortconv__l_cache": 3}, 512 * 2),
        ("kimi-linear", {"kda__head_dim": 64, "ssm__conv_kernel": 4}, 3 * 3 * 8 * 64 + 64 * 64 * 8),
        ("rwkv7", {"wkv__head_size": 64, "token_shift_count": 2}, 512 * 2 + 512 * 64),
        ("minimax-01", {"attention__key_length": 64}, 64 * 64 * 8),
    ],
)
def test_states_of_other_kinds(tmp_path: Path, arch: str, keys: dict[str, object], elements: int) -> None:
    a = attention(
        tmp_path, arch, 2, attention__head_count=8, attention__head_count_kv=[0, 8], embedding_length=512, **keys
    )
    assert a.layers[0].state == elements


def test_what_cannot_be_had(tmp_path: Path) -> None:
    a = attention(tmp_path, "llama", 1, attention__head_count=8, embedding_length=8 * 80, attention__head_count_kv=1)
    assert row_nbytes(80, "f16") == 160
    with pytest.raises(UsageError, match="blocks of 32, but a layer keeps 80"):
        kv_nbytes(a, 512, 512, "q8_0")
    with pytest.raises(UsageError, match="'q6_k' is no KV cache type"):
        kv_nbytes(a, 512, 512, "q6_k")
    silent = attention(tmp_path, "new-arch", 4)
    assert kv_nbytes(silent, 512, 512, "f16").total == 0
    assert any("cannot be sized" in note for note in silent.notes)
