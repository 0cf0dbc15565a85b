"""The header reader against sound and damaged files: each fault is one line that names the file and what is wrong."""

from __future__ import annotations

import io
import os
import resource
import struct
import tempfile
from pathlib import Path

import pytest
from model_gguf_bytes import (
    ARRAY,
    F32,
    F64,
    I64,
    STRING,
    TYPE_F16,
    TYPE_Q4_0,
    U8,
    U32,
    Tensor,
    header,
    key,
    keys,
    moe_keys,
    moe_tensors,
    text,
    write,
)  # fmt: skip

from expertd.errors import ModelFormatError, ModelNotFoundError
from expertd.model.expertmap import build_map
from expertd.model.ggml_types import AMBIGUOUS, GGML_TYPES, type_name
from expertd.model.gguf import read_model
from expertd.model.header import SkippedArray, read_header

DEMO_HEADER = 64928


def fault(path: Path) -> str:
    """The one line for a file that cannot be read."""
    with pytest.raises((ModelFormatError, ModelNotFoundError)) as caught:
        read_model(path)
    line = caught.value.line()
    assert "\n" not in line
    assert str(path) in line
    assert caught.value.hint
    return line


def test_reads_the_built_in_model(demo_model: Path) -> None:
    model = read_model(demo_model)
    assert (model.arch, model.name, len(model.tensors)) == ("qwen3moe", "Tiny MoE", 99)
    assert model.data_offsets == (DEMO_HEADER,)
    assert model.file_nbytes == (os.stat(demo_model).st_size,)
    assert model.tensors[0].offset == DEMO_HEADER
    assert max(t.end for t in model.tensors) == model.nbytes
    assert model.kv["tokenizer.ggml.tokens"] == SkippedArray("string", 2048)
    assert str(model.kv["tokenizer.chat_template"]).startswith("{% for")


def test_agrees_with_the_gguf_package_on_every_tensor(demo_model: Path) -> None:
    import gguf

    theirs = {t.name: t for t in gguf.GGUFReader(demo_model).tensors}
    ours = read_model(demo_model).by_name
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        other = theirs[name]
        assert (t.offset, t.nbytes, t.type_id) == (other.data_offset, other.n_bytes, int(other.tensor_type))
        assert list(t.shape) == list(other.shape)


def test_type_sizes_are_those_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    theirs = {int(t): size for t, size in GGML_QUANT_SIZES.items()}
    # ggml's block_q8_1 has two half floats since 2023; gguf counted them as floats until 0.20. No file holds Q8_1.
    theirs[9] = (32, 36)
    for type_id in theirs.keys() & GGML_TYPES.keys():
        t = GGML_TYPES[type_id]
        assert theirs[type_id] == (t.block, t.block_nbytes), t.name
    assert set(theirs) - set(GGML_TYPES) <= set(AMBIGUOUS)
    assert type_name(153) == "type 153"


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_value(tmp_path: Path, version: int) -> None:
    entries = [
        key("general.architecture", STRING, "x"), key("a", U8, 255), key("b", I64, -5), key("c", F64, 0.5),
        key("d", ARRAY, (U32, [1, 2, 3])), key("e", ARRAY, (STRING, ["p", "q"])), key("f", ARRAY, (F32, [])),
        key("tokenizer.ggml.scores", ARRAY, (F32, [0.5] * 9)), key("x.long", ARRAY, (U8, [1] * 5000)),
    ]  # fmt: skip
    kv = read_model(write(tmp_path / "m.gguf", entries, [], version=version)).kv
    assert (kv["a"], kv["b"], kv["c"], kv["d"], kv["e"], kv["f"]) == (255, -5, 0.5, (1, 2, 3), ("p", "q"), ())
    assert kv["tokenizer.ggml.scores"] == SkippedArray("number", 9)
    assert kv["x.long"] == SkippedArray("number", 5000)


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf", {"general.alignment": 4096}, [Tensor("a", (3,)), Tensor("b", (5,))], alignment=4096
    )
    model = read_model(path)
    assert model.data_offsets[0] % 4096 == 0
    assert [t.offset - model.data_offsets[0] for t in model.tensors] == [0, 4096]
    assert model.warnings == ()


# F3: cut files. (length, what the line says)
CUTS = [
    (0, "is empty"),
    (3, "magic number at byte 3 of 3: short by 1 bytes"),
    (4, "the version at byte 4 of 4: short by 4 bytes"),
    (8, "the tensor count at byte 8 of 8: short by 8 bytes"),
    (24, "short by at least"),
    (30, "short by at least"),
    (100, "short by at least"),
    (5000, "short by"),
    (
        DEMO_HEADER,
        "tensor 'blk.7.ffn_down_exps.weight' ends at byte 9687456, the file has 64928: short by 9622528 bytes",
    ),
    (9687455, "ends at byte 9687456, the file has 9687455: short by 1 bytes"),
]


@pytest.mark.parametrize(("length", "says"), CUTS)
def test_a_cut_file_says_by_how_much(tmp_path: Path, demo_model: Path, length: int, says: str) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(demo_model.read_bytes()[:length])
    assert says in fault(path)


def test_a_header_cut_anywhere_is_one_line(tmp_path: Path) -> None:
    head, _ = header(moe_keys(1) | {"tokenizer.ggml.tokens": ["ab", "c"]}, moe_tensors(1))
    for length in range(len(head)):
        with pytest.raises(ModelFormatError, match=r"short by|is empty"):
            read_header(io.BytesIO(head[:length]), length, tmp_path / "cut.gguf")


# F3: (kind of damage, bytes, what the line says)
def _damaged() -> list[tuple[str, bytes, str]]:
    good = keys({"general.architecture": "x"})
    one = [Tensor("a", (32,))]
    data = b"\0" * 128

    def built(entries: list[bytes], tensors: list[Tensor], **more: int) -> bytes:
        return header(entries, tensors, **more)[0] + data

    twice = built(good, [Tensor("a", (8,)), Tensor("a", (8,))])
    return [
        ("offset 2^40", built(good, [Tensor("a", (32,), offset=1 << 40)]), "short by"),
        ("offset 2^64 - 32", built(good, [Tensor("a", (32,), offset=(1 << 64) - 32)]), "short by"),
        ("offset 7", built(good, [Tensor("a", (32,), offset=7)]), "starts at 7, no multiple of the alignment 32"),
        ("key count 2^40", built(good, one, n_keys=1 << 40), "claims 1099511627776 keys"),
        ("tensor count 2^40", built(good, one, n_tensors=1 << 40), "claims 1099511627776 tensors"),
        ("string of 2^60", built([text("k") + struct.pack("<IQ", STRING, 1 << 60)], one), "claims 1152921504606846976"),
        ("key name of 2^60", built([struct.pack("<Q", 1 << 60) + b"abcdefgh"], one), "claims 1152921504606846976"),
        ("array of 2^60", built([text("k") + struct.pack("<IIQ", ARRAY, U32, 1 << 60)], one), "1152921504606846976"),
        ("array of strings of 2^40", built([text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 40)], one), "items"),
        ("token of 2^60", built([key("tokenizer.x", ARRAY, (STRING, ["a", "b"]))[:-1] + b"\xff" * 9], one), "short by"),
        ("array of arrays", built([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)], one), "an array of arrays"),
        ("value type 99", built([text("k") + struct.pack("<I", 99)], one), "value type 99"),
        ("no key name", built([key("", U32, 1)], one), "has no name"),
        ("a tensor name twice", twice, "tensor 'a' is there twice"),
        ("a key twice", built(good * 2, one), "key 'general.architecture' is there twice"),
        ("version 1", built(good, one, version=1), "is GGUF version 1"),
        ("version 4", built(good, one, version=4), "is GGUF version 4"),
        ("version 0", built(good, one, version=0), "is GGUF version 0"),
        ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + data, "is big-endian"),
        ("alignment 0", built([key("general.alignment", U32, 0)], one), "general.alignment is 0"),
        ("alignment 33", built([key("general.alignment", U32, 33)], one), "general.alignment is 33"),
        ("five dimensions", built(good, [Tensor("a", (1, 1, 1, 1, 1))]), "has 5 dimensions"),
        ("too many elements", built(good, [Tensor("a", (1 << 40, 1 << 40), nbytes=4)]), "too many elements"),
        ("half a block", built(good, [Tensor("a", (33,), TYPE_Q4_0, nbytes=18)]), "no whole Q4_0 blocks"),
        ("overlap", built(good, [Tensor("a", (32,)), Tensor("b", (32,), offset=64)]), "'b' starts 64 bytes after it"),
        ("same place", built(good, [Tensor("a", (8,)), Tensor("b", (8,), offset=0)]), "starts 0 bytes after it"),
        ("not a GGUF", b"PK\x03\x04" + data, "zip or PyTorch"),
        ("a text", b"hello world" + data, "is no GGUF: starts with b'hell'"),
        ("an LFS pointer", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "raw", "says"), _damaged(), ids=[d[0] for d in _damaged()])
def test_damage_is_one_line_that_says_what(tmp_path: Path, kind: str, raw: bytes, says: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    assert says in fault(path), kind


def test_names_from_a_file_cannot_break_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head, _ = header([], [Tensor("evil\n\x1b[31m" + "x" * 500, (32,), offset=7)])
    path.write_bytes(head + b"\0" * 256)
    line = fault(path)
    assert "\x1b" not in line
    assert len(line) < 400


def test_a_long_name_and_a_long_string(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header([key("k" * 5000, U32, 1)], [])[0])
    assert "claims 5000 bytes, more than 4096" in fault(path)
    kept = write(tmp_path / "n.gguf", [key("k", STRING, "v" * (1 << 20) + "w")], [])
    assert read_model(kept).kv["k"] == SkippedArray("string", (1 << 20) + 1)


def test_more_strings_than_any_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    entry = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 1 << 30)
    path.write_bytes(header([entry], [])[0])
    os.truncate(path, 1 << 34)
    assert "strings, more than any vocabulary has" in fault(path)


@pytest.mark.parametrize("type_id", [42, 153, 4, 36])
def test_unknown_types_are_sized_by_the_gap_and_flagged(tmp_path: Path, type_id: int) -> None:
    """F2. The gap holds padding too: what is left of the rows is not the tensor's."""
    tensors = [
        Tensor("token_embd.weight", (64, 10), TYPE_F16),
        Tensor("blk.0.ffn_gate_exps.weight", (64, 32, 8), type_id, nbytes=32 * 8 * 20),
        Tensor("blk.0.ffn_up_exps.weight", (64, 3, 5), type_id, nbytes=3 * 5 * 17),
        Tensor("blk.0.ffn_down_exps.weight", (32, 64, 8), type_id, nbytes=64 * 8 * 9),
    ]
    model = read_model(write(tmp_path / "m.gguf", {"general.architecture": "x", "x.block_count": 1}, tensors))
    assert [t.nbytes for t in model.tensors] == [1280, 5120, 255, 4608]
    assert [t.by_gap for t in model.tensors] == [False, True, True, True]
    assert model.tensors[1].type_name == f"type {type_id}"
    assert len(model.warnings) == 1
    assert f"3 tensors of type {type_id} (" in model.warnings[0]
    assert "9983 bytes" in model.warnings[0]
    experts = build_map(model)
    assert sum(experts.buckets.values()) == model.tensor_nbytes


def test_a_hole_between_tensors_is_said(tmp_path: Path) -> None:
    tensors = [Tensor("a", (8,)), Tensor("b", (8,), offset=128)]
    path = write(tmp_path / "m.gguf", {}, tensors)
    os.truncate(path, os.stat(path).st_size + 256)
    assert read_model(path).warnings == ("96 bytes between tensors belong to none: llama.cpp refuses such a file",)


def test_tensors_out_of_order_keep_their_own_places(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, [Tensor("b", (8,), offset=32), Tensor("a", (8,), offset=0)])
    model = read_model(path)
    base = model.data_offsets[0]
    assert {t.name: t.offset - base for t in model.tensors} == {"b": 32, "a": 0}


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "is a directory" in fault(tmp_path)
    assert "no such file" in fault(tmp_path / "absent.gguf")
    assert str(tmp_path / "nowhere") in fault(tmp_path / "nowhere" / "m.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is no regular file" in fault(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    fault(tmp_path / "loop.gguf")


@pytest.mark.root
def test_the_first_component_that_fails_is_named(demo_model: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        home = Path(top) / "home"
        (home / "models").mkdir(parents=True)
        (home / "models" / "m.gguf").write_bytes(demo_model.read_bytes())
        Path(top).chmod(0o755)
        home.chmod(0o700)
        line = as_nobody(home / "models" / "m.gguf")
    assert f"{home} may not be read by this user (uid 65534)" in line


def as_nobody(path: Path) -> str:
    """The line that another user gets for a path."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            read_model(path)
            os.write(send, b"was read")
        except ModelNotFoundError as error:
            os.write(send, error.line().encode())
        finally:
            os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    with os.fdopen(receive, "rb") as pipe:
        return pipe.read().decode()


def big_vocabulary(path: Path, n_tokens: int = 150_000, n_merges: int = 300_000) -> Path:
    """F1: the architecture's keys stand behind the vocabulary."""
    entries = [
        key("general.architecture", STRING, "qwen3moe"),
        key("tokenizer.ggml.tokens", ARRAY, (STRING, [f"token{i:06d}" for i in range(n_tokens)])),
        key("tokenizer.ggml.merges", ARRAY, (STRING, [f"left{i:06d} right" for i in range(n_merges)])),
        *keys({k: v for k, v in moe_keys(2).items() if k.startswith("qwen3moe.")}),
    ]
    return write(path, entries, moe_tensors(2))


def test_keys_behind_a_large_vocabulary(tmp_path: Path) -> None:
    path = big_vocabulary(tmp_path / "m.gguf")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = read_model(path)
    assert model.integer("block_count") == 2
    assert model.kv["tokenizer.ggml.merges"] == SkippedArray("string", 300_000)
    assert build_map(model).n_experts == 8
    # The bound is 150 MB in all; a reader that makes objects of the tokens takes 60 MB for them alone.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
