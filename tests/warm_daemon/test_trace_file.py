"""Recorded routes on disk: what was whole before a crash is there after it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from expertd.errors import StateError
from expertd.runtime.trace_file import TraceWriter, csv_lines, pack, read_header, read_routes

HEADER = {"model": "m", "layers": 2, "experts": 8, "experts_used": 2, "expert_bytes": {"0": 10, "1": 20}}


def _written(tmp_path: Path) -> bytes:
    path = tmp_path / "x.trace"
    writer = TraceWriter(path, HEADER)
    writer.block(pack(0, 0, 0, [1, 2, 3, 4]) + pack(0, 1, 0, [1, 2, 3, 4]))
    writer.block(pack(2, 0, 1, [5, 6]))
    writer.close()
    assert path.stat().st_mode & 0o077 == 0
    assert writer.nbytes == path.stat().st_size
    return path.read_bytes()


def test_round_trip_and_columns(tmp_path: Path) -> None:
    f = io.BytesIO(_written(tmp_path))
    assert read_header(f, "x") == HEADER
    routes = list(read_routes(f))
    assert [(r.step, r.layer, r.phase, r.ids) for r in routes][-1] == (2, 0, 1, (5, 6))
    lines = list(csv_lines(HEADER, routes))
    assert lines[4] == "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
    assert lines[5:9] == ["0,0,0,0,0,1,0,0,10", "0,0,0,0,1,2,0,0,10", "0,0,1,0,0,3,0,0,10", "0,0,1,0,1,4,0,0,10"]
    assert lines[-1] == "0,1,2,0,1,6,0,0,10"


def test_cut_at_any_byte_gives_the_whole_blocks_before_it(tmp_path: Path) -> None:
    data = _written(tmp_path)
    for end in range(len(data)):
        f = io.BytesIO(data[:end])
        try:
            read_header(f, "x")
        except StateError:
            assert end < len(data) - 60
            continue
        assert len(list(read_routes(f))) in (0, 2)


def test_a_flipped_bit_ends_it(tmp_path: Path) -> None:
    data = bytearray(_written(tmp_path))
    data[-2] ^= 1
    f = io.BytesIO(bytes(data))
    read_header(f, "x")
    assert len(list(read_routes(f))) == 2


def test_a_newer_version_is_said(tmp_path: Path) -> None:
    data = bytearray(_written(tmp_path))
    data[8] = 9
    with pytest.raises(StateError, match="version 9"):
        read_header(io.BytesIO(bytes(data)), "x")
