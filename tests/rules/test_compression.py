"""Codecs against an obvious NumPy reference, by hand, and under fuzz."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigError, ProtocolError
from thinwire.rules import _kernels
from thinwire.rules.compression import BLOCK, CODECS, codec, feedback, is_codec, warm_up

LEVELS = {"int8": 127, "int4": 7}
SIGNS = ["sign2", "sign1"]
IN_BLOCKS = [*LEVELS, *SIGNS]
LOSSY = ["bfloat16", *IN_BLOCKS]
COUNTS = [0, 1, 2, 3, 63, 64, 65, 127, 129, 255, 256, 257, 511, 512, 1000]
TINIEST = float(np.finfo(np.float32).smallest_subnormal)

few = settings(max_examples=30, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    for each in CODECS.values():
        warm_up(each)


def some(count, seed=0, scale=1.0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def reference(d, name):
    """Packed bytes and decoded values of `d`, one block at a time, all in float32."""
    quantised = signs_and_means if name in SIGNS else levels_of
    rows, decoded = [], []
    for start in range(0, len(d), BLOCK):
        block = d[start : start + BLOCK]
        header, codes, values = quantised(block, name)
        zero = LEVELS[name] + 1 if name in LEVELS else 0
        lanes = np.pad(codes, (0, BLOCK - len(block)), constant_values=zero).reshape(8 // CODECS[name].bits, -1)
        payload = sum(lane.astype(np.int32) << CODECS[name].bits * n for n, lane in enumerate(lanes)).astype(np.uint8)
        rows += [np.frombuffer(header, np.uint8), payload[: min(len(block), len(payload))]]
        decoded.append(values)
    return np.concatenate(rows), np.concatenate(decoded)


def levels_of(block, name):
    peak, levels = np.abs(block).max(), np.float32(LEVELS[name])
    scale = np.float32(peak / levels)
    q = np.rint(block * np.float32(levels / peak))
    return scale.tobytes(), np.clip(q, -levels, levels).astype(np.int32) + LEVELS[name] + 1, q * scale


def signs_and_means(block, name):
    size = np.abs(block)
    mean = np.float32(folded(size) / np.float32(len(block)))
    past = size > mean * np.float32(1.23) if name == "sign2" else np.zeros(len(block), bool)
    low, high = mean, mean
    header = mean.tobytes()
    if name == "sign2":
        sides = [np.float32(folded(size * side) / np.float32(max(1, side.sum()))) for side in (~past, past)]
        halves = torch.tensor(sides).bfloat16()
        low, high = halves.float().numpy()
        header = halves.view(torch.uint8).numpy().tobytes()
    negative = np.signbit(block)
    return header, negative + 2 * past, np.where(negative, -1, 1).astype(np.float32) * np.where(past, high, low)


def folded(sizes):
    """Their sum in the order of the format: halves of a block are added to each other until one number is left."""
    block = np.pad(sizes.astype(np.float32), (0, BLOCK - len(sizes))).reshape(4, 64)
    sums = (block[0] + block[1]) + (block[2] + block[3])
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_codecs_in_blocks_equal_the_obvious_reference_bit_for_bit(name, count):
    values, residual = some(count, 1), some(count, 2, 0.1)
    d = (values + residual).numpy()
    bytes_, decoded = reference(d, name)
    packed, left = feedback(values, residual, codec(name))
    assert same_bits(packed, bytes_)
    assert same_bits(codec(name).encode(values + residual), bytes_)
    assert same_bits(left, d - decoded)
    assert np.array_equal(codec(name).decode(packed, count), decoded)


@pytest.mark.parametrize("count", COUNTS)
def test_bfloat16_equals_torch_bit_for_bit(count):
    values = some(count, 1)
    packed = codec("bfloat16").encode(values)
    assert same_bits(packed, values.bfloat16().view(torch.uint8))
    assert torch.equal(codec("bfloat16").decode(packed, count), values.bfloat16().float())


def test_bfloat16_rounds_halves_to_even_like_torch_on_every_sign_and_tie():
    bits = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x00008000, 0x00000001], np.uint32)
    values = torch.from_numpy(np.tile(bits, 50).view(np.float32))
    assert same_bits(codec("bfloat16").encode(values), values.bfloat16().view(torch.uint8))


@pytest.mark.parametrize("count", COUNTS)
def test_float32_loses_nothing_and_clears_the_residual(count):
    values, residual = some(count, 1), some(count, 2)
    packed, left = feedback(values, residual, codec("float32"))
    assert same_bits(packed, values + residual)
    assert torch.equal(codec("float32").decode(packed, count), values + residual)
    assert not left.any()
    assert same_bits(codec("float32").encode(values), values)


@pytest.mark.parametrize("name", CODECS)
def test_only_float32_is_lossless(name):
    assert codec(name).lossy == (name != "float32")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CODECS)
def test_the_packed_size_is_known_from_the_count(name, count):
    assert codec(name).encode(some(count)).numel() == codec(name).size_bytes(count)


def test_a_whole_block_takes_its_codes_and_one_scale():
    assert {name: c.size_bytes(BLOCK) for name, c in CODECS.items()} == {
        "float32": 1024,
        "bfloat16": 512,
        "int8": 260,
        "int4": 132,
        "sign2": 68,
        "sign1": 36,
    }


def test_a_negative_count_is_refused():
    with pytest.raises(ConfigError, match="count is -1"):
        codec("int8").size_bytes(-1)


@few
@given(
    name=st.sampled_from(list(LEVELS)),
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600),
)
def test_no_element_is_off_by_more_than_half_its_blocks_scale(name, numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    decoded = codec(name).decode(codec(name).encode(values), len(numbers)).double()
    for start in range(0, len(numbers), BLOCK):
        block = values[start : start + BLOCK].double()
        half = block.abs().max() / LEVELS[name] / 2
        error = (decoded[start : start + BLOCK] - block).abs().max()
        assert error <= half * (1 + 1e-5) + LEVELS[name] * 2.0**-126


@few
@given(seed=st.integers(0, 999), count=st.integers(1, 600), name=st.sampled_from(list(LEVELS)))
def test_codes_never_pass_the_levels_though_nothing_clamps_them(seed, count, name):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * 10.0 ** rng.integers(-37, 37)).astype(np.float32)
    values[rng.integers(count)] = values.max()
    decoded = codec(name).decode(codec(name).encode(torch.from_numpy(values)), count)
    assert np.isfinite(decoded.numpy()).all()
    assert np.abs(decoded.numpy()).max() <= np.abs(values).max() * (1 + 1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_error_feedback_telescopes(name):
    count = 700
    residual, sent, given_ = torch.zeros(count), torch.zeros(count, dtype=torch.float64), 0
    for step in range(50):
        values = some(count, step)
        packed = codec(name).encode_feedback(values, residual)
        sent += codec(name).decode(packed, count)
        given_ = given_ + values.double()
    torch.testing.assert_close(sent, given_ - residual.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CODECS)
def test_the_pure_form_leaves_its_inputs_alone(name):
    values, residual = some(300, 1), some(300, 2)
    before = values.clone(), residual.clone()
    packed, left = feedback(values, residual, codec(name))
    assert torch.equal(values, before[0])
    assert torch.equal(residual, before[1])
    again = residual.clone()
    assert torch.equal(codec(name).encode_feedback(values, again), packed)
    assert torch.equal(again, left)
    assert torch.equal(values, before[0])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CODECS)
def test_accumulating_adds_the_weighted_decoding(name, count):
    packed, total = codec(name).encode(some(count, 1)), some(count, 2)
    expected = total + 0.3 * codec(name).decode(packed, count)
    codec(name).accumulate(packed, 0.3, total)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_given_outputs_are_filled_and_returned_wherever_they_lie(name):
    values = some(513, 1)
    expected = codec(name).encode(values)
    size = expected.numel()
    for offset in range(5):
        out = torch.full((size + 8,), 7, dtype=torch.uint8)
        room = out[offset : offset + size]
        assert codec(name).encode(values, out=room) is room
        assert torch.equal(room, expected)
        assert (out[:offset] == 7).all()
        assert (out[offset + size :] == 7).all()
        decoded = torch.full((513,), torch.nan)
        assert codec(name).decode(room, 513, out=decoded) is decoded
        assert torch.equal(decoded, codec(name).decode(expected, 513))


@pytest.mark.parametrize("name", CODECS)
def test_pieces_that_start_at_blocks_pack_as_the_whole_does(name):
    values = some(1000)
    pieces = [codec(name).encode(values[:512]), codec(name).encode(values[512:])]
    assert torch.equal(torch.cat(pieces), codec(name).encode(values))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**126, -3.4e38])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_what_is_not_finite_spoils_its_own_block_and_no_residual(name, bad):
    values, clean = some(700), some(700)
    values[300] = bad
    packed, left = feedback(values, torch.zeros(700), codec(name))
    clean_packed, clean_left = feedback(clean, torch.zeros(700), codec(name))
    decoded, expected = codec(name).decode(packed, 700), codec(name).decode(clean_packed, 700)
    expected[256:512] = torch.nan
    clean_left[256:512] = 0.0
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(left, clean_left)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 300, 699])
@pytest.mark.parametrize("name", CODECS)
def test_packed_values_are_finite_where_what_they_decode_to_is(name, place, bad):
    values = some(700)
    assert codec(name).is_finite(codec(name).encode(values), 700)
    values[place] = bad
    packed = codec(name).encode(values)
    assert not codec(name).is_finite(packed, 700)
    assert not codec(name).decode(packed, 700).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_bfloat16_passes_what_is_not_finite_on_and_keeps_no_residual_of_it(bad):
    values = some(700)
    values[300] = bad
    packed, left = feedback(values, torch.zeros(700), codec("bfloat16"))
    decoded = codec("bfloat16").decode(packed, 700)
    torch.testing.assert_close(decoded, values.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    assert left[300] == 0.0
    assert left.isfinite().all()


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_zeros_and_next_to_zero_decode_to_zeros_and_stay_in_the_residual(name):
    values = torch.zeros(BLOCK * 2)
    values[7], values[300] = TINIEST, -1e-39
    packed, left = feedback(values, torch.zeros_like(values), codec(name))
    assert not codec(name).decode(packed, values.numel()).any()
    assert torch.equal(left, values)


@few
@given(name=st.sampled_from(list(CODECS)), count=st.integers(0, 600), data=st.data())
def test_any_bytes_of_the_right_length_decode_to_something(name, count, data):
    size = codec(name).size_bytes(count)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    packed = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    assert codec(name).decode(packed, count).shape == (count,)
    codec(name).accumulate(packed, 0.5, torch.zeros(count))


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", CODECS)
def test_packed_data_of_the_wrong_length_is_the_peers_fault(name, change):
    packed = torch.zeros(codec(name).size_bytes(300) + change, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="300 elements came as"):
        codec(name).decode(packed, 300)
    with pytest.raises(ProtocolError, match=f"in {name} they take"):
        codec(name).accumulate(packed, 1.0, torch.zeros(300))


@pytest.mark.parametrize(
    "values",
    [torch.zeros(4).double(), torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, device="meta")],
    ids=["dtype", "shape", "stride", "device"],
)
@pytest.mark.parametrize("name", CODECS)
def test_vectors_of_another_kind_are_refused(name, values):
    packed = codec(name).encode(torch.zeros(4))
    for call in (
        lambda: codec(name).encode(values),
        lambda: codec(name).encode_feedback(values, torch.zeros_like(values)),
        lambda: codec(name).decode(packed, 4, out=values),
        lambda: codec(name).accumulate(packed, 1.0, values),
    ):
        with pytest.raises(ConfigError):
            call()


def test_outputs_residuals_and_packed_data_that_do_not_fit_are_refused():
    int8, values = codec("int8"), torch.zeros(4)
    with pytest.raises(ConfigError, match="with 8 elements"):
        int8.encode(values, out=torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="zeros_like"):
        int8.encode_feedback(values, torch.zeros(5))
    with pytest.raises(ConfigError, match="with 4 elements"):
        int8.decode(int8.encode(values), 4, out=torch.zeros(5))
    with pytest.raises(ConfigError, match=r"packed is a torch\.float32"):
        int8.decode(torch.zeros(8), 4)


def test_vectors_that_want_gradients_are_taken_as_they_are():
    values = torch.ones(4, requires_grad=True)
    assert codec("int8").decode(codec("int8").encode(values), 4).tolist() == [1.0] * 4


def test_an_unknown_codec_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        codec("bfloat")
    assert not is_codec("bfloat")


def test_recipes_that_say_int2_get_the_codec_of_two_bits():
    assert codec("int2") is codec("sign2")
    assert is_codec("int2")
    assert is_codec("sign2")


def test_one_bit_sends_signs_and_the_mean_magnitude():
    decoded = codec("sign1").decode(codec("sign1").encode(torch.tensor([3.0, -0.5, 0.0, -2.5])), 4)
    assert decoded.tolist() == [1.5, -1.5, 1.5, -1.5]


def test_two_bits_send_signs_and_which_of_two_mean_magnitudes():
    """The mean is 2, and 1.23 times that parts 4 and 6 from 0 to 1."""
    values = torch.tensor([4.0, -1.0, 0.0, -6.0, 0.5, -0.5])
    packed = codec("sign2").encode(values)
    assert codec("sign2").decode(packed, 6).tolist() == [5.0, -0.5, 0.5, -5.0, 0.5, -0.5]


@pytest.mark.parametrize("count", [1, 3, 40, 255, 256])
@pytest.mark.parametrize("name", SIGNS)
def test_values_of_one_magnitude_come_back_whatever_is_left_of_the_block(name, count):
    """Padding counts in no mean: a last block of one value would come back as a 256th of it."""
    values = torch.where(some(count) > 0, 0.75, -0.75)
    packed, left = feedback(values, torch.zeros(count), codec(name))
    assert torch.equal(codec(name).decode(packed, count), values)
    assert not left.any()


@few
@given(
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600),
    name=st.sampled_from(SIGNS),
)
def test_signs_are_kept_and_magnitudes_stay_between_the_blocks_smallest_and_largest(name, numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    decoded = codec(name).decode(codec(name).encode(values), len(numbers))
    for start in range(0, len(numbers), BLOCK):
        block, back = values[start : start + BLOCK], decoded[start : start + BLOCK]
        if not back.any():
            assert block.abs().double().mean() < 2.0**-125
            continue
        assert torch.equal(back.sign()[block != 0] * block.sign()[block != 0] >= 0, block[block != 0] != 0)
        sizes = block.abs().double()
        assert back.abs().max() <= sizes.max() * (1 + 2.0**-8) + 2.0**-126
        assert back.abs().min() >= sizes.min() * (1 - 2.0**-8) - 2.0**-126


@few
@given(seed=st.integers(0, 999), count=st.integers(1, 600), tails=st.sampled_from([1.0, 2.0, 4.0]))
def test_two_bits_have_less_error_than_one_and_one_less_than_nothing(seed, count, tails):
    """Squared error, block by block: each bit's codec sends the means of a finer partition."""
    noise = some(count, seed)
    values = noise.sign() * noise.abs() ** tails
    errors = [
        (codec(name).decode(codec(name).encode(values), count) - values).double().square().sum() for name in SIGNS
    ]
    bound = values.double().square().sum() * (1 + 1e-4)
    assert errors[0] <= errors[1] * (1 + 1e-4) + 1e-4 * bound
    assert errors[1] <= bound


@pytest.mark.parametrize("tails", [1.0, 2.0])
def test_two_bits_have_less_than_half_the_error_of_levels_in_units_of_the_largest_value(tails):
    """What sign2 took the place of: with levels -1, 0 and 1 of the largest value nearly all is rounded to zero."""
    noise = some(25_600)
    values = noise.sign() * noise.abs() ** tails
    blocks = values.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    ternary = ((blocks / scale).round() * scale).reshape(-1)
    found = codec("sign2").decode(codec("sign2").encode(values), values.numel())
    assert (found - values).square().sum() < (ternary - values).square().sum() / 2


@pytest.mark.parametrize("name", SIGNS)
def test_values_that_are_zero_for_ever_stay_within_what_error_feedback_bounds(name):
    """Zero comes back as plus or minus a mean; the sum of what was sent for it stays near zero all the same."""
    count, residual = 2 * BLOCK + 10, torch.zeros(2 * BLOCK + 10)
    sent, largest = torch.zeros(count), 0.0
    for step in range(200):
        values = some(count, step)
        values[::2] = 0.0
        sent += codec(name).decode(codec(name).encode_feedback(values, residual), count)
        largest = max(largest, float(sent[::2].abs().max()))
    assert largest < 8.0, "a few means, which are some 1 each, however many steps were taken"
    assert float(residual.abs().max()) < 30.0


def test_a_header_of_either_side_that_is_not_finite_is_seen():
    packed = codec("sign2").encode(some(300))
    for place in (1, 3, 69, 71):  # the upper bytes of low and high of the first block, and of the last
        spoilt = packed.clone()
        spoilt[place], spoilt[place - 1] = 0x7F, 0x80
        assert not codec("sign2").is_finite(spoilt, 300)
    assert codec("sign2").is_finite(packed, 300)


@pytest.mark.parametrize("name", CODECS)
def test_codecs_pickle(name):
    assert pickle.loads(pickle.dumps(codec(name))) == codec(name)


@pytest.mark.parametrize("name", LOSSY)
def test_the_loops_give_the_same_bytes_uncompiled(name):
    values, residual = some(BLOCK * 4, 1).numpy(), some(BLOCK * 4, 2, 0.1).numpy()
    values[BLOCK], values[2 * BLOCK : 3 * BLOCK], residual[2 * BLOCK : 3 * BLOCK] = np.nan, 0.0, 0.0
    results = []
    for encode, accumulate in (_kernels.SOURCES[name], _kernels.load(name)):
        packed, plain = (np.zeros(codec(name).size_bytes(BLOCK * 4), np.uint8) for _ in range(2))
        left, total, decoded = residual.copy(), residual.copy(), residual.copy()
        encode(values, left, True, packed, BLOCK)
        encode(values, np.ones(BLOCK, np.float32), False, plain, BLOCK)
        accumulate(packed, np.float32(0.5), False, total)
        accumulate(packed, np.float32(1.0), True, decoded)
        results.append((packed, plain, left, total, decoded))
    for uncompiled, compiled in zip(*results, strict=True):
        np.testing.assert_array_equal(uncompiled, compiled)


def test_loops_that_cannot_be_cached_are_compiled_all_the_same(monkeypatch):
    calls = []

    def njit(*signature, cache=False, **options):
        calls.append(cache)

        def decorate(function):
            if cache:
                raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
            return function

        return decorate

    monkeypatch.setattr(_kernels, "njit", njit)
    assert _kernels._compiled(None, test_codecs_pickle) is test_codecs_pickle
    assert calls == [True, False]


def test_other_compilation_failures_are_not_hidden(monkeypatch):
    def njit(*signature, **options):
        raise RuntimeError("something else")

    monkeypatch.setattr(_kernels, "njit", njit)
    with pytest.raises(RuntimeError, match="something else"):
        _kernels._compiled(None, test_codecs_pickle)


def test_two_threads_encode_at_once_and_agree():
    values = some(100_000)
    expected = codec("int4").encode(values)
    results = []
    threads = [threading.Thread(target=lambda: results.append(codec("int4").encode(values))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(each, expected) for each in results] == [True] * 4


@pytest.mark.processes
def test_importing_the_codecs_does_not_import_numba():
    source = Path(_kernels.__file__).parents[2]
    script = "import sys, thinwire.rules.compression as c; c.codec('int8').encode; print('numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
