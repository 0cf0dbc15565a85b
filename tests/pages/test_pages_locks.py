"""Locked pages: borders are counted (M2), a limit is met and told (M1), and VmLck is always what we say it is."""

from __future__ import annotations

import errno
import json
import random
import subprocess
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from expertd.pages import libc, locks
from expertd.pages.locks import LockReport, PageLocks, locked_by_kernel, reason
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.types import ExpertLayout

pytestmark = pytest.mark.root


def _pages_of(layout: ExpertLayout, experts: set[int]) -> int:
    """The model: a page is locked when a pinned expert touches it."""
    pages = set()
    for expert in experts:
        for e in layout.extents(expert):
            pages.update(range(e.offset // libc.PAGE, -(-e.end // libc.PAGE)))
    return len(pages) * libc.PAGE


@pytest.fixture
def pager(small: ExpertLayout) -> Iterator[Pager]:
    with MappedFiles.map(small.files) as mapping:
        pager = Pager(small, mapping)
        yield pager
        pager.close()


def test_a_shared_page_stays_locked_until_its_last_expert_goes(pager: Pager) -> None:
    before = locked_by_kernel()
    assert pager.pin([0, 1]) == [0, 1]
    both = locked_by_kernel() - before
    assert both == _pages_of(pager.layout, {0, 1}) == pager.locks.locked_bytes
    assert pager.unpin([0]) == 1
    assert locked_by_kernel() - before == _pages_of(pager.layout, {1}) == pager.locks.locked_bytes
    assert pager.unpin([1, 0]) == 1
    assert locked_by_kernel() == before
    assert pager.locks.locked_bytes == 0


def test_a_thousand_random_pins_and_unpins(pager: Pager) -> None:
    picks, pinned = random.Random(1), set[int]()
    before = locked_by_kernel()
    for _ in range(1000):
        expert = picks.randrange(16)
        if picks.random() < 0.5:
            pager.pin([expert])
            pinned.add(expert)
        else:
            pager.unpin([expert])
            pinned.discard(expert)
        assert locked_by_kernel() - before == _pages_of(pager.layout, pinned) == pager.locks.locked_bytes
    assert pager.pinned == pinned
    pager.unpin(pinned)
    assert locked_by_kernel() == before


def test_pins_and_dense_locks_share_a_border(pager: Pager) -> None:
    before = locked_by_kernel()
    report = pager.lock_extents(pager.layout.dense)
    assert report.got_bytes == report.wanted_bytes == pager.layout.dense_nbytes
    dense = locked_by_kernel() - before
    pager.pin([0])
    pager.unpin([0])
    assert locked_by_kernel() - before == dense == pager.locks.locked_bytes


def test_dropping_a_pinned_expert_waits_for_its_unpin(pager: Pager) -> None:
    pager.pin([3])
    pager.evict([3])
    assert pager.drop_released([3]) == 0
    dropped = pager.counters.evict_bytes
    pager.unpin([3])
    assert pager.counters.evict_bytes > dropped


def test_stateful(small: ExpertLayout) -> None:
    class Pins(RuleBasedStateMachine):
        @initialize()
        def map(self) -> None:
            self.mapping = MappedFiles.map(small.files)
            self.pager = Pager(small, self.mapping)
            self.before = locked_by_kernel()
            self.pinned: set[int] = set()

        @rule(experts=st.lists(st.integers(0, 15), max_size=6))
        def pin(self, experts: list[int]) -> None:
            assert self.pager.pin(experts) == experts
            self.pinned.update(experts)

        @rule(experts=st.lists(st.integers(0, 15), max_size=6))
        def unpin(self, experts: list[int]) -> None:
            assert self.pager.unpin(experts) == len(self.pinned.intersection(experts))
            self.pinned.difference_update(experts)

        @rule(experts=st.lists(st.integers(0, 15), max_size=6))
        def evict(self, experts: list[int]) -> None:
            self.pager.evict(experts)

        @invariant()
        def the_kernel_agrees(self) -> None:
            if hasattr(self, "pager"):
                locked = locked_by_kernel() - self.before
                assert locked == self.pager.locks.locked_bytes == _pages_of(small, self.pinned)

        def teardown(self) -> None:
            if hasattr(self, "pager"):
                self.pager.close()
                self.mapping.close()

    quick = settings(max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    Pins.TestCase.settings = quick
    Pins.TestCase().runTest()


_M1 = """
import json, logging, resource, sys
from pathlib import Path
from expertd.pages.locks import locked_by_kernel
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.types import ExpertLayout, ExpertTensor, Extent, MoeLayer
limit = 8 << 20
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
path, stride, count, header = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
size = path.stat().st_size
layer = MoeLayer(0, count, (ExpertTensor("gate", "g", 0, header, stride),))
layout = ExpertLayout((path,), (size,), 1, count, 2, (layer,), (Extent(0, 0, header), Extent(0, 20 << 20, 20 << 20)))
warnings = []
class Keep(logging.Handler):
    def emit(self, record): warnings.append(record.getMessage())
logging.getLogger("expertd.pages.pager").addHandler(Keep(logging.WARNING))
mapping = MappedFiles.map([path])
pager = Pager(layout, mapping)
if sys.argv[5] == "dense":
    report = pager.lock_extents(layout.dense)
    got = [report.wanted_bytes, report.got_bytes, report.limit_bytes]
else:
    got = [len(pager.pin(list(range(count))))]
reasons = pager.counters.lock_errors
print(json.dumps({
    "got": got, "kernel": locked_by_kernel(), "ours": pager.locks.locked_bytes, "warnings": warnings,
    "reasons": reasons,
}))
"""


Child = Callable[..., subprocess.CompletedProcess[str]]


def _m1(run_child: Child, large: ExpertLayout, what: str) -> dict[str, object]:
    done = run_child(_M1, str(large.files[0]), "700032", "20", "4128", what, nobody=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_dense_weights_beyond_the_limit_are_locked_in_part_with_one_warning(
    run_child: Child, large: ExpertLayout
) -> None:
    answer = _m1(run_child, large, "dense")
    wanted, got, limit = answer["got"]  # type: ignore[misc]
    assert limit == 8 << 20
    assert wanted > limit
    assert limit - (64 << 10) <= got <= limit
    assert answer["kernel"] == answer["ours"]
    assert answer["kernel"] <= limit  # type: ignore[operator]
    (warning,) = answer["warnings"]  # type: ignore[misc]
    assert "limit 8.0 MiB" in warning
    assert "wanted" in warning
    assert answer["reasons"] == {"limit": 1, "memory": 0, "other": 0}


def test_pins_beyond_the_limit_are_refused_and_counted(run_child: Child, large: ExpertLayout) -> None:
    answer = _m1(run_child, large, "experts")
    assert answer["got"] == [11]
    assert answer["kernel"] == answer["ours"]
    assert answer["kernel"] <= 8 << 20  # type: ignore[operator]
    assert answer["reasons"] == {"limit": 1, "memory": 0, "other": 0}


def test_a_refusal_that_is_not_the_limits_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    code = PageLocks(libc.PAGE).lock([(libc.PAGE, 2 * libc.PAGE)])
    assert code == errno.ENOMEM, "nothing is ever mapped there"
    assert reason(code, libc.PAGE) == "other", "root has no limit"
    monkeypatch.setattr(locks, "lock_limit", lambda: 1 << 40)
    assert reason(code, libc.PAGE) == "other"
    assert reason(code, 1 << 40) == "limit"
    assert (reason(errno.EPERM, 1), reason(errno.EAGAIN, 1)) == ("limit", "memory")


def test_a_report_names_limit_wanted_and_got() -> None:
    assert LockReport(64 << 20, 8 << 20, 8 << 20, 12).warning() == (
        "locked 8.0 MiB of 64.0 MiB wanted, limit 8.0 MiB (ENOMEM); raise LimitMEMLOCK or ulimit -l"
    )
