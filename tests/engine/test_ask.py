"""The filter before the tap's callback: Python hears of the marked nodes alone, and where there is no filter of all."""

from __future__ import annotations

import ctypes
import errno
import gc
import platform
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.engine import ask
from expertd.engine.tap import RouterTap

AT, MARK = 24, int.from_bytes(b"moe_topk", "little")
only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for x86-64")


def _heard() -> tuple[Any, list[bool]]:
    heard: list[bool] = []

    def note(_node: int, asked: bool, _user: object) -> bool:
        heard.append(asked)
        return True

    return ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(note), heard


@only_x86
@given(name=st.binary(min_size=8, max_size=8) | st.just(b"moe_topk"), asked=st.booleans())
def test_python_hears_of_marked_nodes_and_of_computed_ones(name: bytes, asked: bool) -> None:
    callback, heard = _heard()
    filtered = ask.filtered(callback, AT, MARK)
    assert filtered is not None
    node = ctypes.create_string_buffer(b"x" * AT + name, 64)
    meant = not asked or name == b"moe_topk"
    assert filtered(ctypes.addressof(node), asked, None) is meant
    assert heard == [asked] * meant


@only_x86
def test_its_page_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []
    monkeypatch.setattr(ask, "_unmap", gone.append)
    filtered = ask.filtered(_heard()[0], AT, MARK)
    gc.collect()
    gone.clear()  # the trial's
    del filtered
    gc.collect()
    assert len(gone) == 1


@pytest.mark.parametrize("why", ["another processor", "no executable memory", "a trial gone wrong"])
def test_without_it_the_tap_works_as_well(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_code: bytes) -> int:
        raise OSError(errno.EPERM, "not granted")

    if why == "another processor":
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    elif why == "no executable memory":
        monkeypatch.setattr(ask, "_map", refuse)
    else:
        monkeypatch.setattr(ask, "_works", lambda _at, _mark: False)
    tap = RouterTap(lambda *_: None, [8])
    assert not tap.native
    node = ctypes.create_string_buffer(512)
    assert not tap.callback(ctypes.addressof(node), True, None)
