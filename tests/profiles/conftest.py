"""Shapes, profiles that were taught something, and file systems that are full or may not be written."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from expertd.runtime.profile import Profile, Shape

SHAPE = Shape("0123456789abcdef0123456789abcdef", "a-model", 4, 16, 2)


def taught(name: str = "demo", *, shape: Shape = SHAPE, hot: int = 0, tokens: int = 200) -> Profile:
    """A profile whose router likes experts `hot` to `hot + 3`."""
    profile, rng = Profile.empty(name, shape), random.Random(name + str(hot))
    for _ in range(tokens):
        for layer in range(shape.n_layers):
            first = hot + rng.randrange(4)
            other = rng.choice([i for i in range(shape.n_experts) if i != first])
            profile.add(layer, (first, other), 2)
    profile.tokens += tokens
    return profile


@pytest.fixture
def mounted(tmp_path: Path) -> Callable[..., AbstractContextManager[Path]]:
    """`with mounted("size=64k") as directory`: a fresh tmpfs; needs root."""

    @contextmanager
    def mount(options: str) -> Iterator[Path]:
        point = tmp_path / "mounted"
        point.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        try:
            yield point
        finally:
            subprocess.run(["umount", "-l", str(point)], check=True)

    return mount
