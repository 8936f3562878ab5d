import math

import numpy as np
import pytest
import torch
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.noise import NoiseRows, cpu, gumbel_noise, gumbel_of_words, philox4x32, prepare_kernel, reference
from tree_kernels.noise.reference import Counters

SEED = 0x0123_4567_89AB_CDEF


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    k0, k1 = words(key)
    assert philox4x32(np.array([words(counter)], np.uint32), (k0, k1)).tolist() == [words(expected)]


def test_philox_rows_do_not_depend_on_other_rows():
    counters = np.random.default_rng(0).integers(0, 2**32, (37, 4), dtype=np.uint32)
    together = philox4x32(counters, (7, 2**32 - 1))
    for i in range(len(counters)):
        assert (philox4x32(counters[i : i + 1], (7, 2**32 - 1))[0] == together[i]).all()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 63, 4099])
@pytest.mark.parametrize("positions", [[0], [2**32 - 1, 5], [3, 3, 4]])
def test_the_compiled_generator_has_the_references_bits(count, positions):
    rng = np.random.default_rng(count)
    blocks = np.sort(rng.choice(2**30, count, replace=False)).astype(np.uint64)
    counters = Counters(SEED, positions, sample_index=2**32 - 1, stream=255, row=65535)
    compiled = cpu.uniforms(counters, blocks)
    assert compiled.dtype == np.float64 and np.array_equal(compiled, reference.uniforms(counters, blocks))
    assert np.array_equal(
        cpu.uniforms(counters, blocks[::2]), compiled.reshape(len(positions), -1, 4)[:, ::2].reshape(len(positions), -1)
    )


def test_noise_has_the_same_bits_where_nothing_can_be_compiled(monkeypatch):
    compiled = gumbel_noise(SEED, [7, 9], 4099)

    tried = []

    def refused(module):
        tried.append(module)
        raise NoKernelsError("none here")

    monkeypatch.setattr("tree_kernels.noise.cpu.load_kernels", refused)
    cpu._philox.cache_clear()
    try:
        prepare_kernel()
        assert torch.equal(gumbel_noise(SEED, [7, 9], 4099), compiled)
        assert len(tried) == 1, "a failure is remembered"
    finally:
        cpu._philox.cache_clear()


def test_philox_refuses_a_counter_of_another_dtype():
    with pytest.raises(ValueError, match="counter"):
        philox4x32(np.zeros((1, 4), np.uint64), (0, 0))


# Version 1 of the public contract: computed with Python integers and math.log. These numbers must not change.
IDS = [0, 1, 4095, 128255]
VECTORS = [  # position, sample index, stream, the noise of those ids
    (0, 0, 0, [0.98016357421875, -0.524169921875, -1.1224775314331055, 1.3864996433258057]),
    (4097, 0, 0, [-1.0922071933746338, -0.5572441816329956, -0.7718290090560913, 2.1317343711853027]),
    (4097, 2, 0, [0.6793212890625, -0.4359005093574524, 3.509134531021118, -1.1649255752563477]),
    (4097, 0, 3, [2.7057266235351562, -0.4358691871166229, 0.4352627992630005, 0.923859179019928]),
]


@pytest.mark.parametrize("position, sample_index, stream, expected", VECTORS)
def test_noise_version_1_has_its_published_vectors(position, sample_index, stream, expected):
    noise = gumbel_noise(SEED, [position], 128_256, sample_index, stream)
    assert noise.dtype == torch.float32 and noise.shape == (1, 128_256)
    assert noise[0, IDS].tolist() == expected


@pytest.mark.parametrize("word, expected", [(0, -3.1299946308135986), (2**32 - 1, 22.873857498168945)])
def test_the_extreme_words_give_finite_noise(word, expected):
    assert gumbel_of_words(np.array([word], np.uint32)).tolist() == [expected]


def test_the_last_word_would_be_infinite_in_float32():
    """The reason for float64 in the contract."""
    with np.errstate(divide="ignore"):
        u = (np.float32(2**32 - 1) + np.float32(0.5)) * np.float32(2.0**-32)
        assert u == 1 and np.isposinf(-np.log(-np.log(u)))


def test_the_uniform_is_never_0_or_1():
    ends = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    u = (ends.astype(np.float64) + 0.5) * 2.0**-32
    assert (u > 0).all() and (u < 1).all()
    noise = gumbel_of_words(ends)
    assert np.isfinite(noise).all() and (np.diff(noise) > 0).all()
    assert noise.tolist() == [float(np.float32(-math.log(-math.log(x)))) for x in u]


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 5, 4095, 4097, 50_257])
def test_noise_does_not_depend_on_the_size_of_the_vocabulary(vocabulary):
    assert torch.equal(gumbel_noise(SEED, [3, 9], vocabulary), gumbel_noise(SEED, [3, 9], 128_256)[:, :vocabulary])


@pytest.mark.parametrize("positions", [[5], [5, 6, 7, 8], [8, 5, 5, 1], list(range(70)), [2**32 - 1, 5]])
def test_noise_does_not_depend_on_which_other_positions_are_computed(positions):
    together = gumbel_noise(SEED, positions, 4099)
    for row, position in enumerate(positions):
        assert torch.equal(together[row], gumbel_noise(SEED, [position], 4099)[0])


def test_seed_position_sample_and_stream_each_change_the_noise():
    base = gumbel_noise(SEED, [7], 64)
    others = [
        gumbel_noise(SEED + 1, [7], 64),
        gumbel_noise(SEED + 2**32, [7], 64),
        gumbel_noise(SEED, [8], 64),
        gumbel_noise(SEED, [7], 64, sample_index=1),
        gumbel_noise(SEED, [7], 64, stream=1),
    ]
    assert all(not (base == other).any() for other in others)


@pytest.mark.parametrize(
    "field, arguments",
    [
        ("seed", (-1, [0], 8)),
        ("seed", (2**64, [0], 8)),
        ("positions", (0, [0, -1], 8)),
        ("positions", (0, [2**32], 8)),
        ("vocabulary", (0, [0], 0)),
        ("sample_index", (0, [0], 8, -1)),
        ("stream", (0, [0], 8, 0, 256)),
    ],
)
def test_bad_arguments_are_refused_by_name(field, arguments):
    with pytest.raises(ValueError, match=f"^{field}:"):
        gumbel_noise(*arguments)


def test_kept_rows_equal_computed_ones_in_the_requested_order():
    kept = NoiseRows(SEED, 33, sample_index=2)
    kept.prepare([4, 5])
    assert torch.equal(kept.rows([6, 4, 4, 5]), gumbel_noise(SEED, [6, 4, 4, 5], 33, sample_index=2))
    assert torch.equal(kept.row(9), gumbel_noise(SEED, [9], 33, sample_index=2)[0])
    assert kept.rows([]).shape == (0, 33)


def test_missing_rows_are_computed_once_and_together(monkeypatch):
    calls: list[list[int]] = []

    def counted(seed, positions, vocabulary, sample_index=0, stream=0):
        calls.append(list(positions))
        return gumbel_noise(seed, positions, vocabulary, sample_index, stream)

    monkeypatch.setattr("tree_kernels.noise.rows.gumbel_noise", counted)
    kept = NoiseRows(SEED, 16)
    kept.rows([3, 4])
    kept.rows([5, 3, 6, 5])
    kept.rows([3, 4, 5, 6])
    assert calls == [[3, 4], [5, 6]]


def test_forgotten_positions_are_computed_again_with_the_same_bits():
    kept = NoiseRows(SEED, 16)
    before = kept.rows([3, 4, 5])
    kept.forget_before(5)
    assert len(kept) == 1
    assert torch.equal(kept.rows([3, 4, 5]), before)
