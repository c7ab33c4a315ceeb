import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.data import Position, Sampler
from thinwire.errors import ConfigError, DataError

sizes = st.integers(0, 200)
batch_sizes = st.integers(1, 70)
seeds = st.integers(0, 2**40)


def walk(sampler: Sampler, start: Position, epochs: int) -> list[tuple[Position, list[int]]]:
    found = []
    position = start
    while position.epoch < epochs:
        found.append((position, sampler.rows(position).tolist()))
        position = sampler.next(position)
    return found


@given(num_rows=sizes, batch_size=batch_sizes, seed=seeds, worker=st.integers(0, 100), shuffle=st.booleans())
def test_every_row_comes_exactly_once_an_epoch(num_rows, batch_size, seed, worker, shuffle):
    sampler = Sampler(num_rows, batch_size, seed, worker, shuffle)
    for epoch in range(2):
        batches = [rows for position, rows in walk(sampler, Position(), 2) if position.epoch == epoch]
        assert sorted(row for rows in batches for row in rows) == list(range(num_rows))
        assert all(len(rows) == batch_size for rows in batches[:-1])
        if num_rows:
            assert len(batches) == sampler.batches_per_epoch


@given(num_rows=st.integers(1, 200), batch_size=batch_sizes, seed=seeds, data=st.data())
def test_a_fresh_sampler_at_any_position_gives_the_rows_of_an_unbroken_run(num_rows, batch_size, seed, data):
    whole = walk(Sampler(num_rows, batch_size, seed, 3), Position(), 3)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert walk(Sampler(num_rows, batch_size, seed, 3), whole[cut][0], 3) == whole[cut:]


def test_order_changes_with_seed_worker_and_epoch():
    orders = [
        Sampler(50, 50, seed, worker).rows(Position(epoch, 0)).tolist()
        for seed, worker, epoch in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffle_rows_come_in_file_order():
    assert Sampler(5, 3, 0, 0, shuffle=False).rows(Position(7, 1)).tolist() == [3, 4]


def test_no_rows_means_no_batches_and_positions_still_advance():
    sampler = Sampler(0, 8, 0, 0)
    assert sampler.batches_per_epoch == 0
    assert sampler.rows(Position(4, 0)).shape == (0,)
    assert sampler.rows(Position(4, 0)).dtype == np.int64
    assert sampler.next(Position(4, 0)) == Position(5, 0)


def test_a_position_past_its_epoch_is_refused_with_the_number_of_batches():
    with pytest.raises(DataError, match=r"batch 2 of epoch 0 .* 2 batches an epoch"):
        Sampler(10, 5, 0, 0).rows(Position(0, 2))


@pytest.mark.parametrize("arguments", [(-1, 1, 0, 0), (1, 0, 0, 0), (1, 1, -1, 0), (1, 1, 0, -1)], ids=str)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ConfigError, match="or more"):
        Sampler(*arguments)
