"""The arithmetic of a ring, its simulation, and the command that shows both."""

from __future__ import annotations

import json

import pytest

from foretell.bench import ring as ring_bench
from foretell.errors import InputError
from foretell.parallel.choose import Link
from foretell.parallel.plan import Device, RingPlan, Shape
from foretell.parallel.simulate import cells, simulate

LARGE = Shape(layers=80, heads=64, kv_heads=64, dim=128)  # 8,192 wide
NVLINK, ETHERNET = Link(312e12, 300e9, 1e-5), Link(312e12, 12.5e9, 5e-5)


def plan(ranks=5, context=128_000, shape=LARGE, link=NVLINK, memory=80e9) -> RingPlan:
    return RingPlan(ranks, context, shape, Device(memory, 2e12, link))


def test_the_worked_example():
    """80 layers, 128,000 tokens, 8,192 wide: 336 GB, four to five devices of 80 GB."""
    assert LARGE.kv(128_000) == 80 * 128_000 * 8192 * 2 * 2
    assert round(LARGE.kv(128_000) / 1e9) == 336
    assert 4 < LARGE.kv(128_000) / 80e9 < 5
    assert plan().devices_needed == 5
    assert plan(5).fits
    assert not plan(4).fits
    assert plan(4).largest_context < 128_000 <= plan(5).largest_context


def test_nvlink_hides_it_and_ethernet_does_not():
    fast, slow = plan(link=NVLINK), plan(link=ETHERNET)
    assert fast.overlap_tokens == pytest.approx(2 * 312e12 / 300e9)  # 2,080 tokens for full heads and 2 bytes
    assert fast.hidden
    assert slow.overlap_tokens == pytest.approx(49_920)
    assert not slow.hidden
    shared = Shape(80, 64, 8, 128)
    assert plan(link=ETHERNET, shape=shared).hidden, "an eighth of the heads makes it eight times as easy"


def test_the_plan_and_the_simulation_agree():
    for link in (NVLINK, ETHERNET):
        ring = plan(link=link)
        timeline = simulate(5, ring.shard, 64, 64, 128, 2, link, "zigzag")
        assert 80 * timeline.seconds == pytest.approx(ring.prefill_seconds, rel=1e-3)
        assert (timeline.efficiency > 0.999) is ring.hidden


def test_bytes_and_times_by_hand():
    shape = Shape(2, 4, 2, 8, parameters=1000, value_bytes=4)
    ring = RingPlan(4, 80, shape, Device(1e6, 1e6, Link(1e6, 1e6, 1e-3)))
    assert ring.shard == 20
    assert ring.sent_bytes == 2 * 80 * 2 * 8 * 4 * 3 / 4
    assert ring.rank_bytes == 4000 + 20 * 2 * 16 * 2 * 4 + 20 * 16 * 2 * 4
    read = (4000 + 5120) / 1e6
    assert ring.decode_seconds(3) == pytest.approx(read + 2 * (1e-3 + 3 * 4 * 9 * 4 * 3 / 1e6))
    alone = RingPlan(1, 80, shape, ring.device)
    assert alone.decode_seconds() == pytest.approx((4000 + 20480) / 1e6)
    assert alone.hidden


def test_contiguous_shards_take_nearly_twice_as_long():
    times = {layout: simulate(8, 4096, 32, 32, 128, 2, NVLINK, layout) for layout in ("contiguous", "zigzag")}
    assert times["contiguous"].seconds / times["zigzag"].seconds == pytest.approx(2 - 1 / 8, rel=0.01)
    assert times["zigzag"].efficiency > 0.99
    for layout in ("contiguous", "striped", "zigzag"):
        whole = sum(cells(layout, rank, owner, 10) for rank in range(6) for owner in range(6))
        assert whole == 60 * 60 / 2


def test_a_slow_link_shows_as_waiting():
    link = Link(1e12, 1e9, 0)
    timeline = simulate(4, 100, 4, 4, 64, 2, link, "striped")
    transfer, step = 2 * 100 * 4 * 64 * 2 / 1e9, 4 * 4 * 64 * 5000 / 1e12
    assert transfer > step
    assert timeline.seconds == pytest.approx(3 * transfer + step)


def test_a_ring_of_512_is_simulated():
    timeline = simulate(512, 2048, 32, 8, 128, 2, NVLINK, "zigzag")
    assert len(timeline.spans) == 512 * 512 + 512 * 511
    assert 0.9 < timeline.efficiency <= 1


def test_bad_plans_say_what_would_be_right():
    with pytest.raises(InputError, match=r"at least one token per device \(5\), got 4"):
        plan(context=4)
    with pytest.raises(InputError, match="gpus must be from 1 to 512, got 513"):
        simulate(513, 1, 1, 1, 8, 2, NVLINK, "zigzag")
    with pytest.raises(InputError, match=r"kv_heads must divide heads \(8\), got 3"):
        Shape(1, 8, 3, 8)
    assert plan(memory=1.0).devices_needed is None
    assert plan(memory=1.0).largest_context == 0


def test_the_command_and_its_parent(foretell, tmp_path):
    where = ("--out", str(tmp_path))
    code, out, _ = foretell(
        "plan", "ring", "--gpus", "5", "--link", "300", "--context", "128000", "--json", *where
    )
    value = json.loads(out)
    assert code == 0
    assert value["devices_needed"] == 5
    assert value["transfers_hidden"] is True
    assert (tmp_path / "ring.png").stat().st_size > 5000
    code, out, _ = foretell("plan", "ring", "--gpus", "4", "--link", "12.5", "--context", "128000", *where)
    assert "DOES NOT FIT" in out
    assert "NOT hidden" in out
    code, out, _ = foretell("plan", "--p", "0.8", "--json", *where)
    assert json.loads(out)["p"] == 0.8
    code, _, err = foretell(
        "plan", "--p", "0.8", "ring", "--gpus", "4", "--link", "1", "--context", "9", *where
    )
    assert code == 2
    assert "--p has no effect before 'ring'" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--link", "nan"), ("--tflops", "inf"), ("--memory-gb", "inf"), ("--latency-us", "nan")],
)
def test_rates_are_finite(option, value, foretell, tmp_path):
    given = {"--gpus": "2", "--link": "300", "--context": "1000", "--out": str(tmp_path)} | {option: value}
    code, _, _ = foretell("plan", "ring", *(part for pair in given.items() for part in pair))
    assert code == 2


def test_the_bench_counts_cells_and_bytes():
    found = ring_bench.balance(4, 16)
    assert found["zigzag"]["spread_per_step"] == 0
    assert found["zigzag"]["wall_to_mean"] == 1
    assert found["contiguous"]["most_to_mean"] > 1.7
    assert found["contiguous"]["wall_to_mean"] >= found["contiguous"]["most_to_mean"]
    value, spans = ring_bench.measure(ring_bench.Setting(2, 32, 4, 2, 8), "zigzag", 1)
    assert (
        value["sent_bytes"]["pass-kv"] == value["sent_bytes"]["all-gather"] == value["formula_bytes"] == 4096
    )
    assert {(s.rank, s.kind) for s in spans} == {(r, k) for r in (0, 1) for k in ("compute", "transfer")}
