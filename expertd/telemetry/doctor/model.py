"""The model and the settings: whether it can be read, whether it fits, and what works against steering."""

from __future__ import annotations

from expertd.errors import ExpertdError
from expertd.pages.memory import snapshot
from expertd.telemetry.doctor.check import FAIL, OK, WARN, Check, Subject
from expertd.types import ExpertLayout
from expertd.units import format_size


def checks(subject: Subject) -> list[Check]:
    found = [flags(subject)]
    if subject.model is None:
        return found
    layout, check = header(subject)
    found.append(check)
    return [*found, room(layout, subject)] if layout is not None else found


def header(subject: Subject) -> tuple[ExpertLayout | None, Check]:
    """Reads the header and maps the experts."""
    from expertd.model.expertmap import build_map
    from expertd.model.gguf import read_model

    assert subject.model is not None
    why = "Steering needs to know where each expert's bytes lie."
    try:
        layout = build_map(read_model(subject.model)).layout()
    except ExpertdError as error:
        return None, Check("model", FAIL, error.message, why, error.hint or "`expertd inspect MODEL` says more.")
    if not layout.expert_nbytes:
        fix = "Serve it with --steering off, or take a Mixture-of-Experts model."
        return None, Check("model", WARN, "a dense model: it has no experts, so steering gives nothing", why, fix)
    value = (
        f"{len(layout.layers)} layers of {layout.n_experts} experts, {format_size(layout.expert_nbytes)}, "
        f"and {format_size(layout.dense_nbytes)} dense"
    )
    return layout, Check("model", OK, value, why)


def room(layout: ExpertLayout, subject: Subject) -> Check:
    """What of the experts could be held, by the memory that is there now."""
    usable = snapshot(subject.root).usable_bytes
    left = max(0, usable - layout.dense_nbytes)
    budget = left if subject.budget_nbytes is None else subject.budget_nbytes
    ratio = min(budget, layout.expert_nbytes) / layout.expert_nbytes
    why = "The share of the experts that fits decides the speed; KV cache and buffers take a little more."
    value = f"{ratio:.0%} of the experts fit in {format_size(budget)}"
    if subject.budget_nbytes is not None and subject.budget_nbytes > left:
        fix = 'Set cache.budget = "auto": above what is left the kernel drops pages that are in use.'
        return Check("room", WARN, f"budget {format_size(budget)}, but only {format_size(left)} are left", why, fix)
    if layout.token_nbytes > budget:
        fix = "More memory or a smaller quantisation; `expertd plan MODEL` computes both."
        return Check("room", FAIL, f"{value}; one token alone needs {format_size(layout.token_nbytes)}", why, fix)
    if ratio < 0.4:
        return Check("room", WARN, value, why, "Expect it to be slow; `expertd plan MODEL` says what would help.")
    return Check("room", OK, value, why)


def flags(subject: Subject) -> Check:
    """Settings that keep steering from doing its work."""
    why = "Steering needs the weights mapped and not copied, read when wanted and not before."
    against = []
    if subject.steering == "off":
        against.append("cache.steering = off")
    if subject.load == "stock":
        against.append("engine.load = stock reads the whole file first")
    if not subject.lock_dense:
        against.append("cache.lock_dense = false lets the kernel drop what every token uses")
    if subject.n_gpu_layers and subject.steering == "on":
        against.append("engine.n_gpu_layers moves layers' weights out of the page cache")
    if against:
        return Check("settings", WARN, "; ".join(against), why, "`expertd config show` tells where each is set.")
    return Check("settings", OK, "nothing works against steering", why)
