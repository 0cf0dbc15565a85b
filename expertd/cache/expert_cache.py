"""Which experts stay: budget, admission, eviction and pins over a policy's ranking.

Pure state: `route` and its like say what to fetch and evict, `pages` does it and `runtime.steering` joins the two. No
clock but the order of calls, so that a recorded trace replays to the byte. One thread at a time calls it, under the
lock of `runtime.steering`.

Invariants:
1. `resident_bytes <= budget_bytes` after every call.
2. A pinned expert is never evicted but by `drop` (it is gone already), `evict`, or a `resize` below the pins.
3. Every routed expert that is not resident is in `fetch`.
4. What cannot be resident although it is needed now (the budget is smaller than the layer's own experts, or pins leave
   no room) is *transient*: it is in `fetch`, its bytes are in `transient_bytes` and not in `resident_bytes`, and the
   next `route` of a layer that does not want it has it in `evict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from expertd.cache.auto import CANDIDATES, AutoPolicy
from expertd.cache.counters import Counters
from expertd.cache.decision import Decision
from expertd.cache.policy import Policy, make_policy
from expertd.cache.shadow import Shadows
from expertd.types import Phase

DEFAULT_HALF_LIFE = 16.0

_ABSENT, _RESIDENT, _PINNED = 0, 1, 2


class ExpertCache:
    """`sizes` are bytes by expert id, one size in a layer (they are stacked), 0 where there is no such expert; those
    come last in their layer. `half_life` is in tokens."""

    def __init__(
        self,
        sizes: Sequence[int],
        n_experts: int,
        budget_bytes: int,
        policy: str = "auto",
        half_life: float = DEFAULT_HALF_LIFE,
        n_used: int = 0,
    ) -> None:
        self.sizes = list(sizes)
        self.n_experts = n_experts
        self.n_layers = len(self.sizes) // n_experts
        self.n_used = n_used
        """k, experts a token uses in a layer: as told, then as decoded last."""
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self.pinned_bytes = 0
        self.transient_bytes = 0
        self.steps = 0
        """Tokens (or prompt batches) seen: a layer number that does not increase begins a new one."""
        self.counters = Counters(layer_hits=[0] * self.n_layers, layer_misses=[0] * self.n_layers)
        self._half_life = half_life
        self._total_bytes = sum(self.sizes)
        self._crowded = budget_bytes < self._total_bytes
        """Whether anything ever has to go; else other policies are not tried."""
        self._auto = self._make_auto() if policy == "auto" else None
        self._policy = self._auto or make_policy(policy, self.n_layers, n_experts, half_life)
        self._state = bytearray(len(self.sizes))
        self._speculative = bytearray(len(self.sizes))
        self._n_speculative = 0
        self._awaited: set[int] = set()
        """Speculative experts whose layer has not come yet: no victims until then, or a read would be for nothing."""
        self._layer_nbytes = [self.sizes[layer * n_experts] for layer in range(self.n_layers)]
        self._layer_experts = [self._count_experts(layer) for layer in range(self.n_layers)]
        self._transient: set[int] = set()
        self._last_layer = self.n_layers

    def _make_auto(self) -> AutoPolicy:
        """`auto` with its shadows, which are caches of this kind."""
        n_experts, half_life = self.n_experts, self._half_life

        def policy(name: str) -> Policy:
            return make_policy(name, self.n_layers, n_experts, half_life)

        def cache(name: str, sizes: Sequence[int], budget_bytes: int) -> ExpertCache:
            return ExpertCache(sizes, n_experts, budget_bytes, name, half_life, self.n_used)

        return AutoPolicy(self.n_layers, n_experts, half_life, policy,
                          Shadows(self.sizes, n_experts, self.budget_bytes, CANDIDATES, cache))  # fmt: skip

    def _count_experts(self, layer: int) -> int:
        """Experts of a layer: they have the first indices."""
        sizes = self.sizes[layer * self.n_experts : (layer + 1) * self.n_experts]
        return sizes.index(0) if 0 in sizes else self.n_experts

    @property
    def policy_name(self) -> str:
        """The policy in charge now; under `auto` that word and which one it is on."""
        return self._policy.name

    @property
    def shadow_hits(self) -> dict[str, int]:
        """Hits of the shadow caches by policy, of `shadow_requests` each; empty but under `auto`."""
        return dict(self._auto.shadows.hits) if self._auto is not None else {}

    @property
    def shadow_requests(self) -> int:
        return self._auto.shadows.requests if self._auto is not None else 0

    @property
    def policy_switches(self) -> int:
        return self._auto.switches if self._auto is not None else 0

    def route(
        self, layer: int, ids: Sequence[int], phase: Phase = Phase.DECODE, n_tokens: int | None = None
    ) -> Decision:
        """The router picked the expert indices `ids` in `layer`: k of them for a token, or k for each of `n_tokens`
        in turn. Without `n_tokens` a decoded layer is one token's and a prompt's is divided by k. Ids that the model
        has not are dropped and counted."""
        if layer <= self._last_layer:
            self.steps += 1
            if self._auto is not None:
                self._auto.judge(self.steps)
        self._last_layer = layer
        if self._auto is not None and self._crowded and self._auto.watching:
            self._auto.shadows.route(layer, ids, phase, n_tokens)
        if not 0 <= layer < self.n_layers:
            self.counters.out_of_range += len(ids)
            return Decision()
        base = layer * self.n_experts
        if ids and min(ids) >= 0 and max(ids) < self._layer_experts[layer]:
            valid = list(ids)
        else:
            valid = [i for i in ids if 0 <= i < self._layer_experts[layer]]
            self.counters.out_of_range += len(ids) - len(valid)
            if not valid:
                return Decision()
        if phase == Phase.DECODE and n_tokens is None and len(set(valid)) == len(valid):
            self._policy.touch(layer, valid, 1)
            self.n_used = len(valid)
            return self._serve(layer, [base + i for i in valid], phase)
        self._policy.touch(layer, valid, self._tokens(valid, n_tokens))
        return self._serve(layer, [base + i for i in sorted(set(valid))], phase)

    def absent(self, layer: int, ids: Sequence[int]) -> list[int]:
        """What `route` would ask to fetch, ascending. Changes nothing, and may be asked without a lock: a hint."""
        if not 0 <= layer < self.n_layers:
            return []
        base, state, most = layer * self.n_experts, self._state, self._layer_experts[layer]
        missing = [base + i for i in ids if 0 <= i < most and not state[base + i]]
        return sorted({e for e in missing if e not in self._transient}) if missing else missing

    def _tokens(self, ids: list[int], n_tokens: int | None) -> int:
        """Tokens of a batch: as told, else by k where that divides, else the least number that can be."""
        if n_tokens is None and self.n_used:
            n_tokens = len(ids) // self.n_used
        if n_tokens and len(ids) % n_tokens == 0:
            return n_tokens
        least = max(Counter(ids).values())
        return next(n for n in range(least, len(ids) + 1) if len(ids) % n == 0)

    def _serve(self, layer: int, experts: list[int], phase: Phase) -> Decision:
        """1. Let go of transients not wanted now; 2. count; 3. make room for each miss, and 4. admit it, or hold it as
        transient."""
        state, sizes, counters = self._state, self.sizes, self.counters
        evict: list[int] = []
        if self._transient:  # 1
            self._release_transient(experts, evict)
            transient = self._transient
            missing = [e for e in experts if not state[e] and e not in transient]
        else:
            missing = [e for e in experts if not state[e]]
        if self._n_speculative:
            self._settle_speculation(layer, experts)
        n, hits = len(experts), len(experts) - len(missing)  # 2
        nbytes = n * self._layer_nbytes[layer]
        counters.requests += n
        counters.hits += hits
        counters.layer_hits[layer] += hits
        counters.request_bytes += nbytes
        if phase == Phase.PREFILL:
            counters.prompt_requests += n
            counters.prompt_hits += hits
        if not missing:
            counters.hit_bytes += nbytes
            return Decision(hits, missing, evict)
        counters.hit_bytes += hits * self._layer_nbytes[layer]
        counters.layer_misses[layer] += n - hits
        missing.sort()
        held = self._awaited.union(experts) if self._awaited else experts
        cause = "prompt" if phase == Phase.PREFILL else "route"
        for expert in missing:  # 3
            if self._make_room(layer, sizes[expert], held, "route", evict):
                self._insert(expert, cause)  # 4
            else:
                self._transient.add(expert)
                self.transient_bytes += sizes[expert]
        return Decision(hits, missing, evict)

    def _settle_speculation(self, layer: int, experts: list[int]) -> None:
        speculative = self._speculative
        if self._awaited:
            n = self.n_experts
            self._awaited = {e for e in self._awaited if e // n != layer}
        for expert in experts:
            if speculative[expert]:
                speculative[expert] = 0
                self._n_speculative -= 1
                self.counters.predicted_used += 1

    def _release_transient(self, experts: list[int], evict: list[int]) -> None:
        for expert in sorted(self._transient.difference(experts)):
            self._transient.discard(expert)
            self.transient_bytes -= self.sizes[expert]
            self.counters.evictions["transient"] += 1
            evict.append(expert)

    def _make_room(self, layer: int, nbytes: int, held: Container[int], cause: str, evict: list[int]) -> bool:
        if self.pinned_bytes + nbytes > self.budget_bytes:
            return False
        while self.resident_bytes + nbytes > self.budget_bytes:
            victim = self._policy.victim(layer, held)
            if victim < 0:
                return False
            self._evict(victim, cause)
            evict.append(victim)
        return True

    def _insert(self, expert: int, cause: str) -> None:
        self._state[expert] = _RESIDENT
        self.resident_bytes += self.sizes[expert]
        self._policy.insert(expert)
        self.counters.admissions[cause] += 1

    def _evict(self, expert: int, cause: str) -> None:
        if self._state[expert] == _PINNED:
            self.pinned_bytes -= self.sizes[expert]
        self._state[expert] = _ABSENT
        self.resident_bytes -= self.sizes[expert]
        self._policy.remove(expert)
        self.counters.evictions[cause] += 1
        if self._speculative[expert]:
            self._speculative[expert] = 0
            self._n_speculative -= 1
            self._awaited.discard(expert)
            self.counters.predicted_wasted += 1

    def _known(self, experts: Iterable[int]) -> list[int]:
        """Without duplicates and without ids that the model has not."""
        sizes = self.sizes
        return [e for e in dict.fromkeys(experts) if 0 <= e < len(sizes) and sizes[e]]

    def predict(self, experts: Iterable[int]) -> Decision:
        """Speculation: fetch those of `experts` for which there is room, or for which something colder can go."""
        return self._offer(experts, "predict")

    def expect(self, experts: Sequence[int], busy: Iterable[int]) -> Decision:
        """Speculation as good as certain, such as the next layer of a prompt that uses nearly all experts: room is made
        as the route would make it a moment later, from anything but these and the `busy`, in the order given."""
        decision = Decision()
        wanted = self._known(experts)
        held = self._awaited.union(wanted, busy)
        for expert in wanted:
            if self._state[expert] or expert in self._transient:
                continue
            if not self._make_room(expert // self.n_experts, self.sizes[expert], held, "predict", decision.evict):
                break
            self._insert(expert, "predict")
            self._speculate(expert)
            decision.fetch.append(expert)
        decision.fetch.sort()
        return decision

    def _speculate(self, expert: int) -> None:
        self._speculative[expert] = 1
        self._n_speculative += 1
        self._awaited.add(expert)
        self.counters.predicted += 1

    def admit(self, experts: Iterable[int]) -> Decision:
        """Warm-up, hottest first: `fetch` has those accepted (free room, or something colder goes). Read them, or
        take them as they are where they are in the page cache already."""
        return self._offer(experts, "warm")

    def _offer(self, experts: Iterable[int], cause: str) -> Decision:
        decision = Decision()
        layer = self._last_layer % self.n_layers
        for expert in self._known(experts):
            if self._state[expert] or expert in self._transient:
                continue
            if not self._displace(layer, expert, cause, decision):
                continue
            self._insert(expert, cause)
            decision.fetch.append(expert)
            if cause == "predict":
                self._speculate(expert)
        decision.fetch.sort()
        return decision

    def _displace(self, layer: int, expert: int, cause: str, decision: Decision) -> bool:
        policy, size, score = self._policy, self.sizes[expert], self._policy.score(expert)
        if self.pinned_bytes + size > self.budget_bytes:
            return False
        out: list[int] = []
        free = self.budget_bytes - self.resident_bytes
        held = self._awaited.union(decision.fetch)
        while free < size:
            victim = policy.victim(layer, held)
            if victim < 0 or policy.score(victim) >= score:
                return False
            held.add(victim)
            out.append(victim)
            free += self.sizes[victim]
        for victim in out:
            self._evict(victim, cause)
        decision.evict.extend(out)
        return True

    def pin(self, experts: Iterable[int]) -> Decision:
        """Keep `experts` whatever is routed, in the order given, as far as the budget reaches; those that were not
        resident are in `fetch`."""
        decision = Decision()
        layer = self._last_layer % self.n_layers
        wanted = self._known(experts)
        held = set(wanted)
        for expert in wanted:
            if self._state[expert] == _PINNED:
                continue
            size = self.sizes[expert]
            if self._state[expert] == _ABSENT:
                if not self._make_room(layer, size, held, "pin", decision.evict):
                    continue
                if expert in self._transient:
                    self._transient.discard(expert)
                    self.transient_bytes -= size
                else:
                    decision.fetch.append(expert)
                self._insert(expert, "pin")
            self._policy.remove(expert)
            self._state[expert] = _PINNED
            self.pinned_bytes += size
        decision.fetch.sort()
        return decision

    def unpin(self, experts: Iterable[int] | None = None) -> list[int]:
        """Give pins up (all of them by default): they stay resident and rank like the others. Returns them."""
        pinned = [e for e, s in enumerate(self._state) if s == _PINNED]
        chosen = pinned if experts is None else [e for e in self._known(experts) if self._state[e] == _PINNED]
        for expert in chosen:
            self._state[expert] = _RESIDENT
            self.pinned_bytes -= self.sizes[expert]
            self._policy.insert(expert)
        return chosen

    def resize(self, budget_bytes: int) -> Decision:
        """A new budget. Coldest go first, then, where even the pins are too much, the coldest pins."""
        self.budget_bytes = budget_bytes
        self._crowded = budget_bytes < self._total_bytes
        if self._auto is not None:
            self._auto.shadows.resize(budget_bytes)
        decision = Decision()
        layer = self._last_layer % self.n_layers
        if self.pinned_bytes > budget_bytes:
            score = self._policy.score
            pinned = sorted((e for e, s in enumerate(self._state) if s == _PINNED), key=lambda e: (score(e), e))
            for expert in pinned:
                if self.pinned_bytes <= budget_bytes:
                    break
                self._evict(expert, "resize")
                decision.unpin.append(expert)
                decision.evict.append(expert)
        self._make_room(layer, 0, set(), "resize", decision.evict)
        return decision

    def drop(self, experts: Iterable[int]) -> None:
        """Somebody else dropped these pages: they are not resident any more."""
        self._forget(experts, "dropped")

    def evict(self, experts: Iterable[int]) -> list[int]:
        """Evict on request, pinned or not. Returns those that were resident."""
        return self._forget(experts, "request")

    def _forget(self, experts: Iterable[int], cause: str) -> list[int]:
        gone = [e for e in self._known(experts) if self._state[e]]
        for expert in gone:
            self._evict(expert, cause)
        return gone

    def is_resident(self, expert: int) -> bool:
        return self._state[expert] != _ABSENT

    def is_pinned(self, expert: int) -> bool:
        return self._state[expert] == _PINNED

    def states(self) -> bytes:
        """One byte by expert id: 0 absent, 1 resident, 2 pinned. A copy, made in microseconds."""
        return bytes(self._state)

    def resident(self) -> list[int]:
        """Expert ids, ascending, pinned ones included."""
        return [e for e, s in enumerate(self._state) if s]

    def pinned(self) -> list[int]:
        return [e for e, s in enumerate(self._state) if s == _PINNED]

    def scores(self) -> list[float]:
        """How hot each expert is, by expert id; for the heat map and for profiles."""
        return self._policy.scores()

    def hottest(self) -> list[int]:
        """Expert ids with a score above 0, hottest first."""
        scores = self.scores()
        return sorted((e for e, s in enumerate(scores) if s > 0.0), key=lambda e: (-scores[e], e))

    def dump_scores(self) -> list[float]:
        return self.scores()

    def load_scores(self, scores: Sequence[float]) -> None:
        """Start from the scores of an earlier run (by expert id; ones too many or below 0 are ignored)."""
        for expert, score in enumerate(scores[: len(self.sizes)]):
            if score > 0.0 and self.sizes[expert]:
                self._policy.load(expert, score)
