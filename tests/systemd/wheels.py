"""Wheels of what is installed here, so that `make install` in a container needs neither a network nor a compiler.

`python tests/systemd/wheels.py DIRECTORY` packs what expertd needs to be built and to run. A wheel is the files that a
distribution's RECORD names, zipped; scripts are left out, since pip makes them anew.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

BUILD = "hatchling"
_NOT_PACKED = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")


def closure(*names: str) -> list[str]:
    """The distributions that these need, themselves among them; no extras."""
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found[name] = None
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return sorted(found)


def pack(name: str, directory: Path) -> Path:
    """One distribution's wheel; its path."""
    found = distribution(name)
    info = _info_directory(found)
    tag = next(
        line.partition(":")[2].strip() for line in (found.read_text("WHEEL") or "").splitlines() if "Tag:" in line
    )
    path = directory / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    packed = []
    with zipfile.ZipFile(path, "w") as wheel:
        for file in found.files or ():
            inside = str(file)
            passing = inside.endswith(".pyc") or inside.startswith("..")
            if passing or (inside.startswith(f"{info}/") and file.name in _NOT_PACKED):
                continue
            wheel.write(str(file.locate()), inside)
            packed.append(inside)
        lines = [f'"{inside}",,' for inside in (*packed, f"{info}/RECORD")]
        wheel.writestr(f"{info}/RECORD", "\n".join(lines) + "\n")
    return path


def _info_directory(found: Distribution) -> str:
    assert isinstance(found, PathDistribution)
    return next(str(file.parent) for file in found.files or () if file.name == "WHEEL")


def pack_all(directory: Path) -> list[Path]:
    """What expertd needs, and what builds it; expertd itself is left to be built."""
    directory.mkdir(parents=True, exist_ok=True)
    return [pack(name, directory) for name in closure("expertd", BUILD) if name != "expertd"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    for path in pack_all(parser.parse_args().directory):
        print(path.name)


if __name__ == "__main__":
    main()
