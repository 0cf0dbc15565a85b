"""All checks in the order in which a person wants them: the model's way first, then the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from expertd.telemetry.doctor import kernel, memory, model, processor, storage
from expertd.telemetry.doctor.check import WARN, Check, Subject


def examine(subject: Subject, *, probe: bool = True) -> Iterator[Check]:
    """The findings one by one; `probe` measures the disk for a second or two.

    A check that meets something it does not know is a warning with the error's words, never the end of the others.
    """
    areas: list[tuple[str, Callable[[], list[Check]]]] = [
        ("storage", lambda: storage.checks(subject, probe=probe)),
        ("model", lambda: model.checks(subject)),
        ("memory", lambda: memory.checks(subject)),
        ("kernel", lambda: kernel.checks(subject)),
        ("processor", lambda: processor.checks(subject)),
    ]
    for name, area in areas:
        try:
            yield from area()
        except (OSError, ValueError) as error:
            fix = "Please report it with the output of `uname -a`."
            yield Check(name, WARN, f"could not be examined: {error}", "Part of the picture is missing.", fix)
