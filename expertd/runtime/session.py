"""One loaded model, from the file's header to the first token, and the end of it. Lives in the engine thread.

The way of `open_session`:
1. read the header, map the experts;
2. choose whether to steer (`choice`);
3. load the weights (lazily when steering), make the context;
4. when steering: find the mapping, make cache, pager and steering; adopt what is resident already, hottest first by
   what `learnt` knows of it;
5. bring in and lock the dense weights.
Warming up from a profile comes after this and is `warmup`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from expertd.cache.expert_cache import DEFAULT_HALF_LIFE, ExpertCache
from expertd.engine.chat import ChatTemplate
from expertd.engine.context import Context
from expertd.engine.conversations import Conversations
from expertd.engine.generate import Generation
from expertd.engine.model import LoadedModel, start_backend
from expertd.engine.tap import RouterTap
from expertd.errors import BudgetError, ExpertdError, ModelNotFoundError, PagesError
from expertd.model.attention import read_attention
from expertd.model.compute import compute_nbytes
from expertd.model.expertmap import ExpertMap, build_map
from expertd.model.fingerprint import fingerprint
from expertd.model.gguf import read_model
from expertd.model.memory import kv_nbytes
from expertd.model.ubatch import DEFAULT_UBATCH, widest
from expertd.pages import memory
from expertd.pages.guard import BusGuard
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.pages.residency import resident_experts
from expertd.pages.worker import Kind, PagerWorker
from expertd.runtime.choice import Choice, choose
from expertd.runtime.growth import Growth
from expertd.runtime.settings import RuntimeSettings
from expertd.runtime.stats import Stats
from expertd.runtime.steering import Steering
from expertd.types import ExpertLayout
from expertd.units import format_size

log = logging.getLogger("expertd.session")

_MIN_RESERVE = 64 << 20
_RESERVE_SHARE = 0.03

Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is (bytes, or percent)."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model, as clients ask about it. Sizes are bytes."""

    id: str
    path: str
    fingerprint: str
    created: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    chat_template: str | None
    bos: str
    eos: str
    arch: str
    description: str
    nbytes: int
    n_params: int
    n_layers: int
    n_experts: int
    n_experts_used: int
    expert_nbytes: int
    dense_nbytes: int
    token_nbytes: int
    """Expert bytes that one decoded token needs."""


class Session:
    """Everything of one model. `steering` is None when not steering. `close` must come from the opening thread."""

    def __init__(self, info: ModelInfo, choice: Choice, model: LoadedModel, context: Context, tap: RouterTap | None,
                 steering: Steering | None, mapping: MappedFiles | None, guard: BusGuard,
                 prompt_cache_nbytes: int) -> None:  # fmt: skip
        self.info, self.choice, self.model, self.context, self.tap = info, choice, model, context, tap
        self.steering, self.mapping = steering, mapping
        self.conversations = Conversations(context, prompt_cache_nbytes)
        self.generation = Generation(context, self.conversations)
        self.template = ChatTemplate(info.chat_template, bos=info.bos, eos=info.eos)
        self.guard = guard
        self.kv_nbytes = 0
        self.growth: Growth | None = None
        self.dense_locked_nbytes = 0
        self.fixed_budget_bytes: int | None = None
        self.pin_budget_bytes = 0
        self.pins_are_auto = True
        """Whether nobody said how much may be pinned."""
        self.notes: list[str] = [choice.why, *model.notes]

    def check_files(self) -> None:
        """After each step, before its token leaves: raises ModelChangedError when the step read what is no more."""
        self.guard.check()

    def check_identity(self) -> None:
        """Around each request: raises ModelChangedError when a file is not the one that was loaded."""
        if self.mapping is not None:
            self.mapping.check()

    def release_dense(self) -> int:
        """Unlocks the dense weights, the last thing to give before the kernel kills. Returns their bytes."""
        steering, released = self.steering, self.dense_locked_nbytes
        if steering is not None and released:
            steering.worker.submit(Kind.PIN, _unlock_dense(steering, released))
            self.dense_locked_nbytes = 0
        return released

    def close(self) -> None:
        """Frees in the order that llama.cpp needs: the pager's thread, the context, the model, the descriptors."""
        if self.steering is not None:
            self.steering.worker.stop()
            self.steering.pager.close()
        self.context.close()
        self.model.close()
        self.guard.close()
        if self.mapping is not None:
            self.mapping.close()


def _unlock_dense(steering: Steering, nbytes: int) -> Iterator[None]:
    steering.pager.unlock_extents(steering.layout.dense, nbytes)
    yield


def _guard(paths: Sequence[Path]) -> BusGuard:
    """From before the load on: it may read the whole file, and a disk that fails must not kill it without a word."""
    try:
        guard = BusGuard(paths)
    except OSError as error:
        raise ModelNotFoundError(f"cannot open {error.filename}: {error.strerror}") from error
    guard.install()
    return guard


def _mapping(paths: Sequence[Path], *, must: bool) -> MappedFiles | None:
    """Where the files are mapped. Without steering it only serves to see that they stay the same."""
    try:
        return MappedFiles.adopt(paths)
    except PagesError:
        if must:
            raise
        return None


def open_session(
    settings: RuntimeSettings, stats: Stats, report: Report, learnt: Callable[[Session], None] = lambda _: None
) -> Session:
    """Loads what `settings` say; when steering, `learnt` is called before anything is adopted, to rank the experts.
    Raises ModelError, EngineError, BudgetError; then nothing is left open."""
    gguf = read_model(settings.engine.model)
    experts = build_map(gguf)
    attention = read_attention(gguf, experts.n_layers)
    engine, usable = settings.engine, memory.snapshot().usable_bytes

    def kv(n_ubatch: int) -> int:
        return kv_nbytes(attention, engine.n_ctx, n_ubatch, engine.kv_type).total

    def compute(n_ubatch: int) -> int:
        return compute_nbytes(experts, attention, engine.n_ctx, n_ubatch, n_outputs=1)

    n_ubatch = engine.n_ubatch or DEFAULT_UBATCH
    choice = choose(
        settings.steering, str(engine.model), model_nbytes=gguf.nbytes, expert_nbytes=experts.expert_nbytes,
        other_nbytes=kv(n_ubatch) + compute(n_ubatch), usable_nbytes=usable,
    )  # fmt: skip
    layout = experts.layout() if choice.steer else None
    if layout is not None:
        check_budget(settings, layout)
        n_ubatch = engine.n_ubatch or widest(engine.n_ctx, usable, lambda n: kv(n) + compute(n))
    engine = replace(
        engine, repack=choice.repack, lazy_load=engine.lazy_load and choice.steer, n_ubatch=n_ubatch,
    )  # fmt: skip
    start_backend()
    report("load", 0, 100)
    guard = _guard(gguf.files)
    try:
        if not engine.lazy_load and not choice.steer:
            with MappedFiles.map(gguf.files) as whole:
                whole.read_in(lambda percent: report("load", percent, 100))
        model = LoadedModel(engine, lambda share: report("load", int(share * 100), 100))
    except ExpertdError:
        guard.close()
        raise
    try:
        tap = _make_tap(layout) if layout is not None else None
        context = Context(model, engine, tap)
    except ExpertdError:
        model.close()
        guard.close()
        raise
    steering = None
    try:
        guard.check()
        mapping = _mapping(gguf.files, must=layout is not None)
        if layout is not None and tap is not None and mapping is not None:
            steering = _make_steering(settings, layout, mapping, stats)
            tap.routed, tap.want = steering.routed, steering.want
        session = Session(
            _info(settings, experts, model, context, fingerprint(gguf)), choice, model, context, tap, steering,
            mapping, guard, engine.prompt_cache_nbytes,
        )  # fmt: skip
    except ExpertdError:
        context.close()
        model.close()
        guard.close()
        raise
    session.kv_nbytes = kv(context.n_ubatch)
    session.growth = Growth(compute, context.n_ubatch)
    if steering is not None and layout is not None:
        session.fixed_budget_bytes = wanted_budget(settings, layout)
        session.pin_budget_bytes = pin_budget(settings, layout)
        session.pins_are_auto = settings.pin_budget is None and settings.pin_budget_share is None
        steering.worker.start()
        try:
            steering.pager.calibrate()
            learnt(session)
            known = _adopt(steering)
            if settings.warm_level != "none":
                _bring_in_dense(session, settings, report)
        except ExpertdError:
            session.close()
            raise
        if known:
            steering.sweep()
    for note in session.notes:
        log.info("%s", note)
    return session


def check_budget(settings: RuntimeSettings, layout: ExpertLayout) -> None:
    """Raises BudgetError for a budget that was asked for and holds less than one token's experts."""
    budget = wanted_budget(settings, layout)
    if budget is not None and budget < layout.token_nbytes:
        raise BudgetError(
            f"the budget of {format_size(budget)} is below the {format_size(layout.token_nbytes)} of experts that one "
            "token needs",
            hint=f"give at least --budget {-(-layout.token_nbytes // (1 << 20))}MiB",
        )


def wanted_budget(settings: RuntimeSettings, layout: ExpertLayout) -> int | None:
    """Bytes that were asked for, None for auto."""
    if settings.budget_share is not None:
        return int(settings.budget_share * layout.expert_nbytes)
    return settings.budget


def pin_budget(settings: RuntimeSettings, layout: ExpertLayout) -> int:
    """The most bytes of experts that may be pinned. `auto` lets half of the experts be: what is pinned is decided by
    who asks for it, and by the budget."""
    if settings.pin_budget_share is not None:
        return int(settings.pin_budget_share * layout.expert_nbytes)
    return layout.expert_nbytes // 2 if settings.pin_budget is None else settings.pin_budget


def auto_budget(settings: RuntimeSettings, layout: ExpertLayout, usable_nbytes: int) -> int:
    """Bytes for experts of what can be used, less dense weights and a reserve; never more than there are experts."""
    reserve = settings.reserve
    if reserve is None:
        reserve = max(_MIN_RESERVE, int(_RESERVE_SHARE * usable_nbytes))
    return max(0, min(layout.expert_nbytes, usable_nbytes - layout.dense_nbytes - reserve))


def _make_tap(layout: ExpertLayout) -> RouterTap:
    n_experts = [0] * layout.n_layers
    for moe in layout.layers:
        n_experts[moe.layer] = moe.n_experts
    return RouterTap(lambda _layer, _ids, _phase: None, n_experts)


def _make_steering(settings: RuntimeSettings, layout: ExpertLayout, mapping: MappedFiles, stats: Stats) -> Steering:
    budget = wanted_budget(settings, layout)
    if budget is None:
        budget = auto_budget(settings, layout, memory.snapshot().usable_bytes)
    half_life = settings.half_life or DEFAULT_HALF_LIFE
    cache = ExpertCache(
        layout.expert_sizes, layout.n_experts, budget, settings.policy, half_life, layout.n_experts_used
    )
    pager = Pager(layout, mapping)
    return Steering(layout, cache, pager, PagerWorker(pager), stats)


def _adopt(steering: Steering) -> bool:
    """Takes over what is in the page cache already, up to the budget; the rest goes as the budget demands it. False
    where the kernel does not tell what is resident."""
    found = resident_experts(steering.pager.mapping, steering.layout)
    if found is None:
        log.warning("what is resident cannot be known without owning or writing the model file: starting from nothing")
        return False
    scores = steering.cache.scores()
    found.sort(key=lambda e: (-scores[e], e))
    decision = steering.act(lambda cache: cache.admit(found), fetch=False)
    adopted = set(decision.fetch)
    steering.leave_strays(e for e in reversed(found) if e not in adopted)
    log.info("%d experts were resident, %d adopted", len(found), len(decision.fetch))
    return True


def _bring_in_dense(session: Session, settings: RuntimeSettings, report: Report) -> None:
    """Reads the weights that every token uses, largest range by largest, and locks what the limit allows."""
    steering = session.steering
    assert steering is not None
    total, done = steering.layout.dense_nbytes, 0
    report("dense", 0, total)
    if not settings.lock_dense:
        steering.pager.fetch_extents(steering.layout.dense)
        steering.pager.wait_extents(steering.layout.dense)
        report("dense", total, total)
        return
    lock = steering.pager.lock_extents(steering.layout.dense)
    session.dense_locked_nbytes = lock.got_bytes
    done = lock.got_bytes
    if lock.got_bytes < lock.wanted_bytes:
        session.notes.append(lock.warning())
        steering.pager.wait_extents(steering.layout.dense)
    report("dense", done, total)


def _info(
    settings: RuntimeSettings, experts: ExpertMap, model: LoadedModel, context: Context, identity: str
) -> ModelInfo:
    path = settings.engine.model
    return ModelInfo(
        id=settings.alias or path.stem,
        path=str(path),
        fingerprint=identity,
        created=int(time.time()),
        n_ctx=context.n_ctx,
        n_ctx_train=model.n_ctx_train,
        n_vocab=model.n_vocab,
        chat_template=model.chat_template(),
        bos=model.token_text("bos"),
        eos=model.token_text("eos"),
        arch=experts.model.arch,
        description=model.description(),
        nbytes=model.nbytes,
        n_params=model.n_params,
        n_layers=experts.n_layers,
        n_experts=experts.n_experts,
        n_experts_used=experts.n_experts_used,
        expert_nbytes=experts.expert_nbytes,
        dense_nbytes=experts.dense_nbytes,
        token_nbytes=experts.token_expert_nbytes,
    )
