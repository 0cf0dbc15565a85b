"""Profiles, warm-ups, pins and readiness of a running service, by the kernel's own figures."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import pytest

from expertd.errors import NotReadyError, ProfileNotFoundError, RequestError, StateError
from expertd.pages.locks import locked_by_kernel
from expertd.pages.residency import resident_bytes
from expertd.runtime.rehearsal import RehearsalOrder
from expertd.runtime.selection import Selection
from expertd.runtime.service import Service
from expertd.runtime.warmup import WarmOrder
from tests.runtime.conftest import answer
from tests.warm_daemon.conftest import CHAT, CODE, Serve

pytestmark = pytest.mark.linux65


async def _last(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async for event in events:
        found = event
    return found


async def _teach(service: Service) -> None:
    for _ in range(2):
        for name, prompts in (("code", CODE), ("chat", CHAT)):
            for prompt in prompts[:-1]:
                await answer(service, prompt, 24, profile=name)


def test_the_right_profile_hits_more_than_the_wrong_one_and_than_none(serve: Serve) -> None:
    async def hits(profile: str | None) -> float:
        warm = {"warm_level": "profile", "ready_requires": "warm"} if profile else {}
        async with serve(budget_share=0.25, profile=profile or "nobody", **warm) as service:
            await answer(service, CODE[-1], 24)
            assert service.steering is not None
            c = service.steering.cache.counters
            return (c.hits - c.prompt_hits) / (c.requests - c.prompt_requests)

    async def all_of_it() -> tuple[float, float, float]:
        async with serve(budget_share=0.25) as service:
            await _teach(service)
            rows = {r["name"]: r for r in service.actions.profiles.list()}
            assert rows["code"]["tokens"] > 50
            assert rows["default"]["tokens"] == 0
        return await hits("code"), await hits("chat"), await hits(None)

    right, wrong, none = asyncio.run(all_of_it())
    assert right > wrong
    assert right > none


def test_ready_means_warm_where_that_is_required(serve: Serve) -> None:
    async def look() -> tuple[list[str], dict[str, Any], int]:
        async with serve(budget_share=0.4) as service:
            await _teach(service)
        states = []
        async with serve(budget_share=0.4, profile="code", warm_level="profile", ready_requires="warm") as service:
            states.append(service.state)
            made = service.actions.warm_up
            assert made is not None
            steering = service.steering
            assert steering is not None
            found = resident_bytes(
                steering.pager.mapping, [x for e in made.experts for x in steering.layout.extents(e)]
            )
            assert service.warm_done_nbytes == service.warm_target_nbytes > 0
            assert found is not None
            # The token that is computed before it is ready may have taken the place of as many experts.
            return states, made.report(), found + steering.layout.token_nbytes

    states, report, resident = asyncio.run(look())
    assert states == ["ready"]
    assert report["phase"] == "done"
    assert report["experts"]["resident"] == report["experts"]["target"] > 100
    assert resident >= report["target_bytes"]


def test_only_a_rehearsal_makes_it_ready_where_that_is_required(serve: Serve) -> None:
    async def rehearse() -> list[str]:
        seen = []
        async with serve(budget_share=0.4, ready_requires="rehearsed", wait="warming") as service:
            while service.progress.what != "rehearsal":
                await service.wait_changed()
            with pytest.raises(NotReadyError, match="rehearsal"):
                await answer(service, CODE[0], 2)
            missed = await _last(service.rehearse(RehearsalOrder((CODE[0],), "demo", 6, target_tps=1e6, pin=True)))
            assert not missed["ok"]
            assert missed["missed"][0]["what"] == "tokens_per_second"
            assert any("memory" in a for a in missed["advice"])
            seen.append(service.state)
            met = await _last(service.rehearse(RehearsalOrder((CODE[0],), "demo", 6, target_tps=0.001)))
            assert met["ok"], met["missed"]
            assert met["first"][0]["text"] == met["second"][0]["text"]
            seen.append(service.state)
            first = met["first"][0]
            taught = service.actions.profiles.get("demo").tokens
            assert list((service.settings.state or Path()).rglob("demo.profile")), "saved at once"
            assert taught <= first["prompt_tokens"] + first["tokens"], "the second run taught, too"
            await answer(service, CODE[0], 2)
        return seen

    assert asyncio.run(rehearse()) == ["warming", "ready"]


def test_warming_another_topic_takes_the_place_of_the_first_and_keeps_the_budget(serve: Serve) -> None:
    async def both() -> None:
        async with serve(budget_share=0.3) as service:
            await _teach(service)
            for name in ("code", "chat", "code"):
                report = await _last(service.warm(WarmOrder("profile", name)))
                assert report["experts"]["resident"] == report["experts"]["target"]
                assert report["resident_bytes"] == report["target_bytes"]
                cache = service.cache_report()
                assert cache["resident_bytes"] <= cache["budget_bytes"]
            again = await _last(service.warm(WarmOrder("profile", "code")))
            assert again["read_bytes"] == 0
            small = await _last(service.warm(WarmOrder("all", "code", budget_bytes=500_000)))
            assert small["experts"]["target"] == 500_000 // 13_824
            assert "beyond the budget" in small["skipped"][0]["why"]
            with pytest.raises(ProfileNotFoundError):
                await _last(service.warm(WarmOrder("profile", "nope")))
            service.actions.profiles.clear("blank")
            with pytest.raises(StateError, match="learnt nothing"):
                await _last(service.warm(WarmOrder("profile", "blank")))
            assert (await answer(service, CODE[0], 4))[0]

    asyncio.run(both())


def test_pins_are_locks_within_their_limit_and_evictions_are_gone(serve: Serve) -> None:
    async def pins() -> None:
        async with serve(budget_share=0.5, pin_budget=1_000_000) as service:
            actions, steering = service.actions, service.steering
            assert steering is not None
            before = locked_by_kernel()
            answered = actions.pin(Selection(experts=tuple(range(40, 120))))
            assert answered["pinned"]["bytes"] <= 1_000_000
            assert answered["skipped"][0]["what"] == f"{80 - answered['pinned']['experts']} experts"
            assert "pin budget" in answered["skipped"][0]["why"]
            grown = locked_by_kernel() - before
            assert answered["pinned"]["bytes"] <= grown <= answered["pinned"]["bytes"] * 1.35
            assert len(steering.pager.pinned) == answered["pinned"]["experts"]
            await answer(service, CODE[0], 8)
            gone = actions.evict(Selection(layers=frozenset({0})))
            assert gone["evicted"]["experts"] > 0
            assert not any(steering.cache.is_resident(e) for e in range(64))
            assert actions.unpin(Selection())["pinned_total"]["experts"] == 0
            assert locked_by_kernel() == before
            with pytest.raises(RequestError, match="say which"):
                actions.evict(Selection())
            actions.evict(Selection(), everything=True)
            assert service.cache_report()["experts"]["resident"] == 0
            assert (await answer(service, CODE[0], 4))[0]

    asyncio.run(pins())


def test_a_bad_profile_name_is_the_clients_fault(serve: Serve) -> None:
    async def ask() -> None:
        async with serve(budget_share=0.5) as service:
            with pytest.raises(RequestError, match="no profile's name"):
                await answer(service, CODE[0], 2, profile="../x")

    asyncio.run(ask())


def test_a_cancelled_warm_up_is_gone_on_with(serve: Serve) -> None:
    async def cancel() -> None:
        async with serve(budget_share=0.9) as service:
            await _once_free(service)
            events = service.warm(WarmOrder("all"))
            async for _ in events:
                break
            await events.aclose()
            whole = await _once_free(service)
            assert whole["resident_bytes"] == whole["target_bytes"]

    async def _once_free(service: Service) -> dict[str, Any]:
        """The next warm-up, as soon as the cancelled one has ended; it may not even have begun."""
        for _ in range(500):
            try:
                return await _last(service.warm(WarmOrder("all")))
            except StateError:
                await asyncio.sleep(0.02)
        raise AssertionError("the cancelled warm-up never ended")

    asyncio.run(cancel())


def _fill(file: IO[bytes]) -> None:
    while True:
        file.write(b"x" * 4096)


@pytest.mark.root
def test_a_full_and_a_read_only_state_directory_serve_on(serve: Serve, tmp_path: Path) -> None:
    state = tmp_path / "small"
    state.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(state)], check=False)
    if done.returncode:
        pytest.skip("a tmpfs cannot be mounted here")

    async def talk(tokens: int) -> str:
        async with serve(budget_share=0.4, state=state, save_seconds=0.05) as service:
            await answer(service, CODE[0], 6, profile="code")
            await asyncio.sleep(0.2)
            assert service.actions.profiles.get("code").tokens >= tokens
            return service.actions.profiles.trouble

    try:
        assert asyncio.run(talk(6)) == ""
        with (state / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            _fill(filler)
        assert "No space left" in asyncio.run(talk(12))
        subprocess.run(["mount", "-o", "remount,ro", str(state)], check=True)
        assert "Read-only" in asyncio.run(talk(12))
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)
