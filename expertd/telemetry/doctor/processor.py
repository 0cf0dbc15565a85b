"""The processor: physical cores against threads, and whether llama.cpp was built for it."""

from __future__ import annotations

import re

from expertd.telemetry.doctor.check import FAIL, OK, WARN, Check, Subject, text

# Flag in /proc/cpuinfo, word in llama.cpp's own description of its build; by what they gain, most first.
_INSTRUCTIONS = (("avx512f", "AVX512"), ("avx2", "AVX2"), ("fma", "FMA"), ("f16c", "F16C"), ("avx_vnni", "AVX_VNNI"))


def checks(subject: Subject) -> list[Check]:
    return [cores(subject), build(subject)]


def cores(subject: Subject) -> Check:
    """Hyperthreads share the units that matrix products need."""
    from expertd.engine.settings import physical_cores

    physical = physical_cores()
    threads = subject.threads or physical
    why = "Decoding waits for the slowest thread: more threads than physical cores make it slower."
    value = f"{threads} threads on {physical} physical cores"
    if threads > physical:
        return Check("threads", WARN, value, why, "Set engine.threads = 0, which takes the physical cores.")
    return Check("threads", OK, value, why)


def build(subject: Subject) -> Check:
    """The instruction sets that llama.cpp uses against those that the processor has."""
    why = "llama.cpp built without them computes several times slower."
    try:
        from llama_cpp import llama_cpp
    except Exception as error:
        fix = "Install the package llama-cpp-python in the version that expertd asks for."
        return Check("build", FAIL, f"llama.cpp cannot be loaded: {error}", why, fix)
    return from_description(llama_cpp.llama_print_system_info().decode(), text(subject.root / "proc/cpuinfo"), why)


def from_description(description: str, cpuinfo: str, why: str) -> Check:
    """Compares llama.cpp's `AVX2 = 1 | ...` with the flags of the processor."""
    used = set(re.findall(r"(\w+) = 1", description))
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    missing = [word for flag, word in _INSTRUCTIONS if flag in flags and word not in used]
    value = ", ".join(word for _, word in _INSTRUCTIONS if word in used) or "none of " + ", ".join(
        w for _, w in _INSTRUCTIONS
    )
    if missing:
        fix = "Build it here: CMAKE_ARGS=-DGGML_NATIVE=on pip install --no-binary :all: --force-reinstall "
        fix += "llama-cpp-python."
        return Check("build", WARN, f"{value}; the processor also has {', '.join(missing)}", why, fix)
    if not flags:
        return Check("build", OK, description.strip(" |") or "unknown", why)
    return Check("build", OK, value, why)
