"""Split models: any shard opens all, links are followed, and what is missing or mixed up is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_gguf_bytes import Tensor, key, keys, moe_keys, moe_tensors, write, write_shards

from expertd.errors import ModelFormatError, ModelNotFoundError
from expertd.model.expertmap import build_map
from expertd.model.fingerprint import fingerprint
from expertd.model.gguf import read_model


def three_shards(directory: Path) -> list[Path]:
    """F4: the first without tensors, an expert tensor of layer 1 in the third."""
    tensors = moe_tensors(2)
    late = [t for t in tensors if t.name == "blk.1.ffn_down_exps.weight"]
    rest = [t for t in tensors if t not in late]
    return write_shards(directory, "model", moe_keys(2), [[], rest, late])


def test_totals_of_three_shards(tmp_path: Path) -> None:
    paths = three_shards(tmp_path)
    whole = build_map(read_model(write(tmp_path / "whole.gguf", moe_keys(2), moe_tensors(2))))
    split = build_map(read_model(paths[0]))
    assert split.model.files == tuple(paths)
    assert split.buckets == whole.buckets
    assert split.model.nbytes == sum(p.stat().st_size for p in paths)
    layer = split.layout().by_layer[1]
    assert [t.file for t in layer.tensors] == [1, 1, 2]
    down = layer.tensors[2]
    assert down.offset == split.model.data_offsets[2]
    assert down.extent(7).end == paths[2].stat().st_size
    assert split.layout().expert_nbytes == whole.layout().expert_nbytes
    assert split.layout().dense_nbytes == whole.layout().dense_nbytes


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_any_shard_opens_all(tmp_path: Path, shard: int) -> None:
    paths = three_shards(tmp_path)
    model = read_model(paths[shard])
    assert model.files == tuple(paths)
    assert model.arch == "qwen3moe"
    assert len(model.tensors) == len(moe_tensors(2))


def test_the_missing_shard_is_named(tmp_path: Path) -> None:
    paths = three_shards(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelNotFoundError, match=r"model-00003-of-00003\.gguf is missing in"):
        read_model(paths[1])
    paths[0].unlink()
    with pytest.raises(ModelNotFoundError, match=r"model-00001-of-00003\.gguf, model-00003-of-00003\.gguf are missing"):
        read_model(paths[1])


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    paths = three_shards(tmp_path)
    with paths[2].open("r+b") as file:
        file.truncate(paths[2].stat().st_size - 1)
    with pytest.raises(ModelFormatError, match=r"model-00003-of-00003\.gguf: tensor .* short by 1 bytes"):
        read_model(paths[0])


def test_links_of_a_download_cache(tmp_path: Path) -> None:
    """Names in a snapshot directory link to blobs named by their hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(three_shards(tmp_path)):
        (snapshot / path.name).symlink_to(Path("../..") / "blobs" / f"hash{i}")
        path.rename(blobs / f"hash{i}")
    linked = sorted(snapshot.iterdir())
    assert read_model(linked[1]).files == tuple(linked)


def test_a_link_under_another_name(tmp_path: Path) -> None:
    paths = three_shards(tmp_path)
    (tmp_path / "best.gguf").symlink_to("second.gguf")
    (tmp_path / "second.gguf").symlink_to(paths[1].name)
    assert read_model(tmp_path / "best.gguf").files == tuple(paths)


def test_a_shard_whose_name_tells_nothing(tmp_path: Path) -> None:
    renamed = three_shards(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelNotFoundError, match="is one of 3 shards, but its name does not say which"):
        read_model(renamed)


def test_shards_that_are_mixed_up(tmp_path: Path) -> None:
    paths = three_shards(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelFormatError, match="says it is shard 3 of 3, its name says 2 of 3"):
        read_model(paths[0])


def test_a_tensor_in_two_shards_and_a_wrong_total(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "twice", moe_keys(1), [[Tensor("a", (8,))], [Tensor("a", (8,))]])
    with pytest.raises(ModelFormatError, match=r"tensor 'a' is in twice-00001-of-00002\.gguf as well"):
        read_model(paths[0])
    paths = write_shards(tmp_path, "few", moe_keys(1), [[Tensor("a", (8,))], [Tensor("b", (8,))]], total=3)
    with pytest.raises(ModelFormatError, match="the shards hold 2 tensors, the header promises 3"):
        read_model(paths[0])


def test_absurd_split_keys(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    write(path, [key("split.count", 4, (1 << 32) - 1)], [])
    with pytest.raises(ModelFormatError, match=r"split\.count says 4294967295 shards"):
        read_model(path)
    write(path, [key("split.count", 8, "two")], [])
    with pytest.raises(ModelFormatError, match=r"split\.count is 'two', not a count"):
        read_model(path)


def test_a_model_in_one_file_with_a_shards_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00001.gguf", keys(moe_keys(1)), moe_tensors(1))
    assert read_model(path).files == (path,)


def test_fingerprint_survives_moving_and_splitting_and_tells_weights_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", moe_keys(2), moe_tensors(2))
    first = fingerprint(read_model(path))
    assert len(first) == 32
    moved = path.rename(tmp_path / "other.gguf")
    assert fingerprint(read_model(moved)) == first
    assert fingerprint(read_model(three_shards(tmp_path)[0])) == first
    tensor = read_model(moved).by_name["blk.1.ffn_up_exps.weight"]
    with moved.open("r+b") as file:
        file.seek(tensor.offset + tensor.nbytes // 2)
        file.write(b"\x01")
    assert fingerprint(read_model(moved)) != first
    renamed = write(tmp_path / "keys.gguf", moe_keys(2, used=3), moe_tensors(2))
    assert fingerprint(read_model(renamed)) != first
