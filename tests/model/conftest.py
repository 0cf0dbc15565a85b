"""Lets the tests of this directory import their helpers, and gives them one large model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from expertd.model.expertmap import ExpertMap

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def big_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """60 GB in three sparse shards: 94 layers x 128 experts, a vocabulary of 152k."""
    from big_header import write_big

    return write_big(tmp_path_factory.mktemp("big"))


@pytest.fixture(scope="session")
def big(big_paths: list[Path]) -> ExpertMap:
    from expertd.model.expertmap import build_map
    from expertd.model.gguf import read_model

    return build_map(read_model(big_paths[0]))
