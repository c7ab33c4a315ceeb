"""Rounds over a simulated network: any order of delivery, any moment of a generation change, any nonsense."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from thinwire.exchange import round as round_module
from thinwire.exchange import rounds as rounds_module
from thinwire.exchange.cuts import Cut
from thinwire.parameters import Fragment
from thinwire.protocol.messages import AMONG_WORKERS, Part, Sum
from thinwire.strategies import Setting

SIZES = (1, 2, 255, 256, 257, 700, 1024, 3001)
LOSSY = ("bfloat16", "int8", "int4", "sign2", "sign1")


def over(seeds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test once a seed, and says which one failed: hundreds of schedules without hundreds of test items."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name != "seed"]

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            for seed in range(seeds):
                try:
                    test(**arguments, seed=seed)
                except AssertionError as error:
                    raise AssertionError(f"with seed {seed}: {error}") from error

        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def reference_mean(values: list[torch.Tensor | None], weights: list[float]) -> torch.Tensor:
    """Σ wᵢ dᵢ / Σ wᵢ in the order of the workers, as plainly as it can be written."""
    size = next(v.numel() for v in values if v is not None)
    total, weight_sum = torch.zeros(size), 0.0
    for value, weight in zip(values, weights, strict=True):
        if value is not None and weight > 0:
            total.add_(value, alpha=weight)
            weight_sum += weight
    return total.div_(weight_sum) if weight_sum else total


def vectors(rng: random.Random, workers: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return [torch.randn(size, generator=generator) for _ in range(workers)]


def shuffled(rng: random.Random, items: Any) -> list[Any]:
    found = list(items)
    rng.shuffle(found)
    return found


# -- exact rounds -----------------------------------------------------------------------------------------------------


@over(seeds=60)
def test_a_float32_mean_is_the_same_bits_everywhere_and_the_plain_weighted_mean(mesh: Any, seed: int) -> None:
    rng = random.Random(seed)
    workers, size = rng.randint(2, 6), rng.choice(SIZES)
    net = mesh(range(workers), seed, size=size)
    values = vectors(rng, workers, size)
    weights = [float(rng.randint(0, 64)) for _ in values]
    weights[rng.randrange(workers)] = 3.0
    for worker in shuffled(rng, range(workers)):
        net.launch(worker, "train:0", values[worker], weight=weights[worker])
        net.run(rng.randint(0, 20))
    net.run()
    assert torch.equal(net.mean("train:0"), reference_mean(list(values), weights))


@over(seeds=20)
def test_weights_that_are_no_whole_numbers_give_the_same_bits_in_any_order_of_delivery(mesh: Any, seed: int) -> None:
    values = vectors(random.Random(0), 5, 700)
    weights = [0.1, 0.7, 0.2, 1e-3, 1e3 / 3]
    net = mesh(range(5), seed, size=700)
    for worker in shuffled(random.Random(seed), range(5)):
        net.launch(worker, "train:0", values[worker], weight=weights[worker])
        net.run(random.Random(seed).randint(0, 8))
    net.run()
    assert torch.equal(net.mean("train:0"), reference_mean(list(values), weights))


@over(seeds=60)
def test_several_rounds_of_several_fragments_are_in_flight_at_once(mesh: Any, seed: int) -> None:
    rng = random.Random(seed)
    workers, size = rng.randint(2, 5), rng.choice((257, 1024, 3001))
    cut = Cut(size, Setting(fragments=rng.randint(1, 3)))
    pieces = [cut.fragment(round) for round in range(cut.count)]
    net = mesh(range(workers), seed, size=size)
    plan = {round: vectors(rng, workers, pieces[round % len(pieces)].size) for round in range(6)}
    todo = {worker: list(range(6)) for worker in range(workers)}
    while any(todo.values()):
        worker = rng.choice([w for w, left in todo.items() if left])
        round = todo[worker].pop(0)
        net.launch(worker, f"train:{round}", plan[round][worker], fragment=pieces[round % len(pieces)])
        net.run(rng.randint(0, 6))
    net.run()
    for round, values in plan.items():
        assert torch.equal(net.mean(f"train:{round}"), reference_mean(list(values), [1.0] * workers))
    assert not any(m.waiting_for() or m.wanted() or m.refused for m in net.machines.values())


@over(seeds=10)
def test_slices_of_many_chunks_give_the_same_mean(mesh: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "CHUNK_BYTES", 1024)
    rng = random.Random(seed)
    net = mesh(range(3), seed, size=3001)
    values = vectors(rng, 3, 3001)
    for worker in shuffled(rng, range(3)):
        net.launch(worker, "train:0", values[worker], note={"from": worker})
        net.run(rng.randint(0, 20))
    net.run()
    assert torch.equal(net.mean("train:0"), reference_mean(list(values), [1.0] * 3))
    assert all(net.landed[w]["train:0"].notes == {i: {"from": i} for i in range(3)} for w in range(3))


def test_contributions_without_weight_or_values_count_for_nothing(mesh: Any) -> None:
    values = vectors(random.Random(1), 4, 700)
    values[2].fill_(float("nan"))
    net = mesh(range(4), 1, size=700)
    net.launch(0, "train:0", values[0], weight=2.0)
    net.launch(1, "train:0", None, weight=5.0)
    net.launch(2, "train:0", values[2], weight=0.0)
    net.launch(3, "train:0", values[3], weight=1.0)
    net.run()
    assert torch.equal(net.mean("train:0"), reference_mean([values[0], None, None, values[3]], [2.0, 0, 0, 1.0]))


@pytest.mark.parametrize("name", ["float32", "int4"])
def test_a_round_to_which_nobody_contributes_has_a_mean_of_zero_and_leaves_residuals_alone(
    mesh: Any, name: str
) -> None:
    net = mesh(range(3), 0, size=700)
    for worker in range(3):
        net.residual[worker].fill_(0.5)
        net.launch(worker, "train:0", None if worker else torch.ones(700), weight=0.0, codec_name=name)
    net.run()
    assert torch.equal(net.mean("train:0"), torch.zeros(700))
    assert all(torch.equal(left, torch.full((700,), 0.5)) for left in net.residual.values())


def test_one_worker_alone_has_its_own_values_as_the_mean(mesh: Any) -> None:
    net = mesh([3], size=300)
    values = torch.randn(300)
    net.launch(3, "train:0", values, weight=2.0, note={"rows": 4})
    assert torch.allclose(net.mean("train:0"), values)
    assert net.landed[3]["train:0"].notes == {3: {"rows": 4}}


@pytest.mark.parametrize("size", [1, 100, 257, 700])
@over(seeds=5)
def test_every_worker_hears_every_note_whatever_it_owns(mesh: Any, seed: int, size: int) -> None:
    """Of a fragment smaller than workers × 256 some own nothing, and hear its notes as all others do."""
    rng = random.Random(seed)
    net = mesh(range(4), seed, size=size)
    for worker in shuffled(rng, range(4)):
        net.launch(worker, "train:0", torch.ones(size), note={"from": worker})
        net.run(rng.randint(0, 10))
    net.run()
    for worker in range(4):
        assert net.landed[worker]["train:0"].notes == {i: {"from": i} for i in range(4)}
        assert net.machines[worker].refused == 0


def test_what_a_worker_hears_of_notes_grows_with_the_workers_and_not_with_their_square(mesh: Any) -> None:
    net = mesh(range(8), size=8 * 256)
    for worker in range(8):
        net.launch(worker, "train:0", torch.ones(8 * 256), note={"from": worker})
    heard = 0
    while any(net.links.values()):
        heard += sum(len(header.get("n") or ()) for header, _ in net.links.get((0, 1), ()) if header["t"] == "sum")
        net.run(1)
        if heard:
            break
    net.run()
    assert heard == 1, "an owner that has all parts passes on its own note"
    assert net.landed[1]["train:0"].notes == {i: {"from": i} for i in range(8)}


def test_a_worker_that_owns_nothing_hears_that_a_round_was_opened(mesh: Any) -> None:
    net = mesh(range(4), size=100)
    net.launch(1, "train:7", torch.ones(100))
    net.run()
    for worker in (0, 2, 3):
        assert net.machines[worker].wanted() == [("train:7", Fragment(0, 100), "float32")]
    assert net.machines[0].waiting_for() == {"train:7": [0, 2, 3]}
    assert net.machines[2].waiting_for() == {"train:7": [0]}


# -- lossy codecs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSY)
@over(seeds=8)
def test_a_lossy_mean_is_the_same_bits_everywhere(mesh: Any, name: str, seed: int) -> None:
    rng = random.Random(seed)
    workers, size = rng.randint(2, 5), rng.choice(SIZES)
    net = mesh(range(workers), seed, size=size)
    for round in range(4):
        values = vectors(rng, workers, size)
        for worker in shuffled(rng, range(workers)):
            net.launch(worker, f"train:{round}", values[worker], weight=float(rng.randint(0, 9)), codec_name=name)
            net.run(rng.randint(0, 10))
        net.run()
        net.mean(f"train:{round}")


@pytest.mark.parametrize("name", LOSSY)
@over(seeds=3)
def test_with_feedback_nothing_is_lost_and_accumulated_means_come_to_the_truth(mesh: Any, name: str, seed: int) -> None:
    rng = random.Random(seed)
    workers, size, num_rounds = 3, 1000, 40
    net = mesh(range(workers), seed, size=size)
    values = vectors(rng, workers, size)
    landed = torch.zeros(size, dtype=torch.float64)
    for round in range(num_rounds):
        for worker in shuffled(rng, range(workers)):
            net.launch(worker, f"train:{round}", values[worker], codec_name=name)
        net.run()
        landed += net.mean(f"train:{round}").double()
    contributed = sum(v.double() for v in values) * num_rounds
    assert torch.allclose(landed * workers + net.owed(), contributed, atol=2e-3)
    coarsest = 3 * max(float(v.abs().max()) for v in values)
    slower = 2 if name == "sign1" else 1  # what is far above the mean waits until its residual has raised that
    off = (landed - contributed / workers).abs().max() / num_rounds
    assert float(off) < slower * coarsest / num_rounds * 3


def test_without_feedback_one_bit_stays_away_from_the_truth(mesh: Any) -> None:
    """What the feedback is for: the test above would fail here."""
    net = mesh(range(2), size=256, feedback=False)
    values = torch.linspace(0.05, 1.0, 256)
    for round in range(20):
        for worker in range(2):
            net.launch(worker, f"train:{round}", values, codec_name="sign1")
        net.run()
    mean = torch.stack([net.mean(f"train:{round}") for round in range(20)]).mean(0)
    assert float((mean - values).abs().max()) > 0.3


# -- quorum -----------------------------------------------------------------------------------------------------------


@over(seeds=60)
def test_who_never_launches_blocks_nobody_once_the_grace_time_is_over(mesh: Any, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 300, 1024, 1500))
    net = mesh(range(4), seed, size=size, quorum=0.5, grace_s=2.0, resend=True)
    values = vectors(rng, 4, size)
    late = rng.randrange(4)
    for worker in range(4):
        if worker != late:
            net.launch(worker, "train:0", values[worker])
    net.run()
    net.pass_time(1.9)
    net.run()
    assert not any("train:0" in found for found in net.landed.values())
    net.pass_time(0.2)
    net.run()
    others = [w for w in range(4) if w != late]
    assert all("train:0" in net.landed[w] for w in others)
    assert all(net.landed[w]["train:0"].late == (late,) for w in others)
    expected = reference_mean([None if w == late else values[w] for w in range(4)], [1.0] * 4)
    assert torch.equal(net.landed[others[0]]["train:0"].mean, expected)
    net.launch(late, "train:0", values[late])
    net.run()
    assert torch.equal(net.mean("train:0"), expected)
    assert torch.equal(net.residual[late], values[late])


@over(seeds=80)
def test_what_misses_rounds_arrives_with_later_ones(mesh: Any, seed: int) -> None:
    rng = random.Random(seed)
    workers, size = rng.randint(2, 5), rng.choice((1, 300, 1500))
    net = mesh(range(workers), seed, size=size, quorum=rng.choice((0.4, 0.5, 0.75)), grace_s=1.0, resend=True)
    contributed = torch.zeros(size, dtype=torch.float64)
    todo = {worker: list(range(5)) for worker in range(workers)}
    while any(todo.values()):
        worker = rng.choice([w for w, left in todo.items() if left])
        values = torch.randn(size, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        contributed += values.double()
        net.launch(worker, f"train:{todo[worker].pop(0)}", values)
        net.run(rng.randint(0, 6))
        net.pass_time(rng.choice((0.0, 0.3, 0.8)))
    while net.run():
        net.pass_time(5.0)
    landed = sum(net.total(f"train:{round}").double() for round in range(5))
    assert all(len(found) == 5 for found in net.landed.values())
    assert torch.allclose(landed + net.owed(), contributed, atol=1e-4)


def test_a_note_that_missed_the_first_chunk_is_heard_by_nobody_not_even_its_own_sender(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes put settings in force and publish: one worker acting on a note that no other has would part from them."""
    monkeypatch.setattr(round_module, "CHUNK_BYTES", 1024)  # 256 float32: two chunks a slice
    net = mesh(range(3), size=1536, quorum=0.5, grace_s=1.0, resend=True)
    sent_to_0 = [(1, 0), (2, 0)]
    for worker in (1, 2):
        net.launch(worker, "train:0", torch.ones(1536))
    for link in sent_to_0:
        net.deliver(link)  # chunk 0 of worker 0's slice; chunk 1 is still on the way
    net.cut_links |= set(sent_to_0)
    net.pass_time(2.0)
    net.run()
    net.pass_time(2.0)  # the other owners sum theirs without worker 0 as well
    net.launch(0, "train:0", torch.ones(1536), note={"setting": "changed"})
    net.cut_links.clear()
    while net.run():
        net.pass_time(2.0)
    heard = [0 in net.landed[worker]["train:0"].notes for worker in range(3)]
    assert len(set(heard)) == 1, heard


@over(seeds=80)
def test_all_workers_hear_the_same_notes_whichever_workers_sums_are_without(mesh: Any, seed: int) -> None:
    """The joint optimizer's step is made of notes: each worker must have those of all contributions that count."""
    rng = random.Random(seed)
    workers, size = rng.randint(2, 5), rng.choice((1, 3, 300, 1500))
    net = mesh(range(workers), seed, size=size, quorum=rng.choice((0.4, 0.5, 0.75)), grace_s=1.0, resend=True)
    for worker in shuffled(rng, list(range(workers))):
        net.launch(worker, "train:0", torch.ones(size), note={"rows": worker})
        net.run(rng.randint(0, 6))
        net.pass_time(rng.choice((0.0, 0.3, 0.8)))
    while net.run():
        net.pass_time(5.0)
    heard = [net.landed[worker]["train:0"].notes for worker in range(workers)]
    counted = set().union(*net.counted_by_chunk("train:0"))
    assert all(notes == {worker: {"rows": worker} for worker in counted} for notes in heard), (heard, counted)
    assert all(list(notes) == sorted(counted) for notes in heard)


def test_the_note_of_a_worker_whose_own_slice_is_summed_without_it_is_heard_by_all_where_another_sum_counts_it(
    mesh: Any,
) -> None:
    net = mesh(range(4), size=1024, quorum=0.5, grace_s=1.0)
    for worker in (0, 1, 2):
        net.launch(worker, "train:0", torch.ones(1024), note={"rows": worker})
    for worker in (0, 1, 2):
        net.deliver((worker, 3))
    net.pass_time(2.0)  # worker 3 sums its slice of a round that it has not launched
    net.launch(3, "train:0", torch.ones(1024), note={"rows": 3})
    net.run()
    assert net.counted_by_chunk("train:0") == [[0, 1, 2, 3]] * 3 + [[0, 1, 2]]
    assert all(sorted(net.landed[worker]["train:0"].notes) == [0, 1, 2, 3] for worker in range(4))


@pytest.mark.parametrize(("quorum", "size"), [(1.0, 2048), (1.0, 700), (0.5, 2048)])  # of 700 two workers own nothing
def test_each_worker_hears_each_note_of_a_full_round_once(mesh: Any, quorum: float, size: int) -> None:
    net = mesh(range(5), size=size, quorum=quorum, grace_s=1.0)
    carried: dict[int, list[int]] = {worker: [] for worker in range(5)}
    take = net.inject

    def inject(sender: int, receiver: int, header: Any, payload: memoryview | None = None) -> None:
        body = AMONG_WORKERS.decode(header)
        carried[receiver] += [sender] if isinstance(body, Part) and body.note is not None else []
        if isinstance(body, Sum):  # a worker that owns nothing hears its own note beside the others'
            carried[receiver] += [worker for worker in body.notes or {} if worker != receiver]
        take(sender, receiver, header, payload)

    net.inject = inject
    for worker in range(5):
        net.launch(worker, "train:0", torch.ones(size), note={"rows": worker})
    net.run()
    assert {worker: sorted(heard) for worker, heard in carried.items()} == {
        worker: [other for other in range(5) if other != worker] for worker in range(5)
    }


# -- generations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", *LOSSY])
@over(seeds=30)
def test_a_round_broken_off_by_a_death_is_launched_again_and_every_account_balances(
    mesh: Any, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    workers, size = rng.randint(3, 5), rng.choice((1500, 3001))
    net = mesh(range(workers), seed, size=size, resend=True)
    victim = rng.randrange(workers)
    for worker in range(workers):
        if worker != victim:
            net.residual[worker].copy_(torch.randn(size) * 0.1)
    before = net.owed()
    values = vectors(rng, workers, size)
    for worker in shuffled(rng, range(workers)):
        net.launch(worker, "train:0", values[worker], codec_name=name)
    # The victim sums nothing, so that nobody completes: the others' own slices may well be summed by then.
    net.cut_links |= {(w, victim) for w in range(workers)}
    net.run(rng.randint(0, 30))
    assert not any(net.landed[w] for w in net.machines)
    given_up = net.form([w for w in range(workers) if w != victim])
    net.cut_links.clear()
    net.counted.clear()
    for worker in shuffled(rng, given_up):
        net.relaunch(worker, given_up[worker])
        net.run(rng.randint(0, 10))
    net.run()
    contributed = sum(v.double() for w, v in enumerate(values) if w != victim) + before
    landed = net.mean("train:0").double() * (workers - 1)
    assert torch.allclose(landed + net.owed(), contributed, atol=1e-4)


@over(seeds=60)
def test_a_generation_at_any_moment_loses_and_doubles_nothing(mesh: Any, seed: int) -> None:
    """Workers come and go with rounds in flight; float32 and quorum 1, so what lands is what was contributed."""
    rng = random.Random(seed)
    size = rng.choice((1, 257, 1500))
    net = mesh(range(3), seed, size=size, resend=True)
    members = [0, 1, 2]
    for round in range(6):
        key = f"train:{round}"
        values = {w: torch.randn(size, generator=torch.Generator().manual_seed(rng.randrange(2**31))) for w in range(9)}
        for worker in shuffled(rng, members):
            net.launch(worker, key, values[worker])
            net.run(rng.randint(0, 4))
        if rng.random() < 0.6:
            leaver = rng.choice(members) if len(members) > 2 and rng.random() < 0.5 else None
            members = [w for w in members if w != leaver]
            if leaver is None:
                members.append(max(members) + 1)
            newcomers = set(members) - set(net.machines)
            given_up = net.form(members)
            landed = [w for w in members if key in net.landed[w]]
            for worker in members:
                if landed:  # others hold it: the joint state brings it, as `Peer` asks for it
                    net.landed[worker].setdefault(key, net.landed[landed[0]][key])
                else:
                    net.relaunch(worker, given_up[worker])
                    if worker in newcomers:
                        net.launch(worker, key, None, weight=0.0)
            before = None if landed else [values[w] if w not in newcomers else None for w in sorted(members)]
        else:
            before = [values[w] for w in sorted(members)]
        net.run()
        mean = net.mean(key)
        if before is not None:
            assert torch.allclose(mean, reference_mean(before, [1.0] * len(before)), atol=1e-6)
        assert all(float(net.residual[w].abs().max()) < 1e-5 for w in members)


@pytest.mark.parametrize("sent_first", [False, True])
def test_what_missed_a_round_that_is_then_given_up_is_not_contributed_twice(mesh: Any, sent_first: bool) -> None:
    net = mesh(range(4), size=1024, quorum=0.5, grace_s=1.0, resend=True)
    values = [torch.full((1024,), float(10**w)) for w in range(4)]
    net.cut_links |= {(3, w) for w in range(3)}  # worker 3 will die: its slice's sum never comes
    for worker in (0, 1, 3):
        net.launch(worker, "train:0", values[worker])
    if sent_first:
        net.cut_links |= {(2, w) for w in range(4)}
        net.launch(2, "train:0", values[2])
    net.run()
    net.pass_time(2.0)
    net.run()  # 0 and 1 have summed their slices without worker 2, and say so
    if not sent_first:
        net.launch(2, "train:0", values[2])
        net.run()
    given_up = net.form([0, 1, 2])
    net.cut_links.clear()
    for worker, launches in given_up.items():
        net.relaunch(worker, launches)
    while net.run():
        net.pass_time(2.0)
    landed = net.mean("train:0").double() * 3
    assert torch.allclose(landed + net.owed(), sum(values[:3]).double())


def test_what_an_owner_summed_without_launching_is_undone_with_the_round(mesh: Any) -> None:
    """A quorum lets an owner sum its slice of a round that it has not launched; given up, nothing of it is owed."""
    net = mesh(range(4), size=1024, quorum=0.5, grace_s=1.0, resend=True)
    values = vectors(random.Random(3), 4, 1024)
    net.cut_links |= {(3, w) for w in range(3)}  # worker 3 will die: its slice's sum never comes
    for worker in (0, 1, 3):
        net.launch(worker, "train:0", values[worker], codec_name="int4")
    net.run()
    net.pass_time(2.0)
    net.run()
    assert not any("train:0" in net.landed[worker] for worker in range(3))
    assert net.owner_residual[2].any()
    given_up = net.form([0, 1, 2])
    assert given_up[2] == []
    net.cut_links.clear()
    for worker in (0, 1):
        net.relaunch(worker, given_up[worker])
    net.launch(2, "train:0", values[2], codec_name="int4")
    net.run()
    landed = net.mean("train:0").double() * 3
    assert torch.allclose(landed + net.owed(), sum(v.double() for v in values[:3]), atol=1e-5)


@pytest.mark.parametrize("name", LOSSY)
def test_two_rounds_of_one_fragment_that_are_given_up_leave_no_account_open(mesh: Any, name: str) -> None:
    """The second one's sum took up what the first one's had left: both are undone, the later first."""
    net = mesh(range(3), size=700)
    values = [vectors(random.Random(round), 3, 700) for round in range(2)]
    for round in range(2):
        for worker in range(3):
            net.launch(worker, f"train:{round}", values[round][worker], codec_name=name)
    for owner in (0, 1, 0, 1):  # worker 2's parts arrive, its sums do not
        net.deliver((2, owner))
    net.cut_links |= {(2, 0), (2, 1)}
    net.run()
    assert not any(net.landed[worker] for worker in range(2))
    assert all(net.owner_residual[worker].any() for worker in range(2))
    given_up = net.form([0, 1])
    net.cut_links.clear()
    for worker in range(2):
        net.relaunch(worker, given_up[worker])
    net.run()
    contributed = sum(values[round][worker].double() for round in range(2) for worker in range(2))
    landed = sum(net.mean(f"train:{round}").double() * 2 for round in range(2))
    assert torch.allclose(landed + net.owed(), contributed, atol=1e-4)


def test_a_worker_that_keeps_completed_rounds_while_the_joint_state_is_on_its_way_holds_nobody_up(mesh: Any) -> None:
    """It only listens and sums, as long as that takes: what it keeps is not what others opened here in vain."""
    net = mesh(range(3), size=700)
    net.keeping.add(2)
    for round in range(round_limit := 2 * rounds_module.MOST_OPEN):
        for worker in (0, 1):
            net.launch(worker, f"train:{round}", torch.ones(700))
        net.run()
        assert [key for key, _, _ in net.machines[2].wanted()] == [f"train:{round}"]
        net.launch(2, f"train:{round}", None, weight=0.0)
        net.run()
    assert all(len(found) == round_limit for found in net.landed.values())
    assert not any(machine.refused for machine in net.machines.values())


def test_messages_of_a_generation_not_heard_of_yet_wait_for_it(mesh: Any) -> None:
    net = mesh(range(2), size=600)
    net.generation += 1
    net.machines[0].configure(2, {0: 0, 1: 0})
    net.launch(0, "train:0", torch.ones(600))
    net.run()
    assert net.machines[1].wanted() == []
    net.machines[1].configure(2, {0: 0, 1: 0})
    assert [key for key, _, _ in net.machines[1].wanted()] == ["train:0"]
    net.launch(1, "train:0", torch.zeros(600))
    net.run()
    assert torch.equal(net.mean("train:0"), torch.full((600,), 0.5))


def test_messages_of_an_older_generation_or_attempt_are_passed_over(mesh: Any) -> None:
    net = mesh(range(2), size=600)
    net.launch(0, "train:0", torch.ones(600))
    old = [(header, payload) for header, payload in net.links[0, 1]]
    net.form([0, 1])
    net.links[0, 1].clear()
    for header, payload in old:
        net.inject(0, 1, header, payload)
        net.inject(0, 1, header | {"g": 2, "a": 7}, payload)
    assert net.machines[1].wanted() == []
    assert net.machines[1].refused == 0
