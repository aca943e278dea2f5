"""The allocator's arithmetic: its rules one by one, and what must hold for any sequence of requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench.estimate.allocator import (
    LARGE_SEGMENT,
    MIN_LARGE_REQUEST,
    SETTINGS,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    CachingAllocator,
    has_expandable_segments,
    rounded,
    segment_bytes,
)

MIB = 2**20


@pytest.mark.parametrize(
    ("environment", "grows"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:true"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_the_environment_s_setting_is_pytorch_s(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], grows: bool
) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert has_expandable_segments() == CachingAllocator().expandable == grows


@pytest.mark.parametrize(("asked", "given_"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512(asked: int, given_: int) -> None:
    assert rounded(asked) == given_


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments(asked: int, segment: int) -> None:
    assert segment_bytes(asked) == segment
    allocator = CachingAllocator()
    allocator.allocate(1, asked)
    assert allocator.reserved == segment


def test_small_requests_share_a_segment_and_large_ones_do_not_use_it() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, MIB)
    allocator.allocate(2, MIB)
    assert allocator.reserved == SMALL_SEGMENT
    allocator.allocate(3, 512)
    assert allocator.reserved == 2 * SMALL_SEGMENT
    allocator.allocate(4, 2 * MIB)
    assert allocator.reserved == 2 * SMALL_SEGMENT + LARGE_SEGMENT


def test_a_rest_of_up_to_one_mib_stays_with_a_large_block_and_counts_as_allocated() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 12 * MIB)
    allocator.free(1)
    allocator.allocate(2, 11 * MIB)
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (11 * MIB, 12 * MIB, 12 * MIB)
    allocator.free(2)
    allocator.allocate(3, 11 * MIB - 512)
    assert allocator.allocated == 11 * MIB - 512, "a rest of more than one MiB is split off"


def test_with_expandable_segments_every_rest_is_split_and_pages_are_mapped() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(1, 12 * MIB)
    assert allocator.reserved == LARGE_SEGMENT
    allocator.allocate(2, 7 * MIB)
    assert allocator.reserved == LARGE_SEGMENT
    allocator.allocate(3, 5 * MIB)
    assert allocator.reserved == 2 * LARGE_SEGMENT, "the last mebibyte of the first page is used first"
    assert allocator.allocated == allocator.requested == 24 * MIB
    for number in (1, 2, 3):
        allocator.free(number)
    allocator.allocate(4, 40 * MIB)
    assert allocator.reserved == 2 * LARGE_SEGMENT, "all of it has merged into one block"


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    for number, size in ((1, 30 * MIB), (2, 16 * MIB), (3, 24 * MIB)):
        allocator.allocate(number, size)
    for number in (1, 2, 3):
        allocator.free(number)
    allocator.allocate(4, 16 * MIB)
    assert allocator.allocated == 16 * MIB
    allocator.allocate(5, 24 * MIB)
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 70 * MIB)


def test_neighbours_merge() -> None:
    allocator = CachingAllocator()
    for number in range(10):
        allocator.allocate(number, 2 * MIB)
    assert allocator.reserved == LARGE_SEGMENT
    for number in (3, 5, 4, 0, 9):
        allocator.free(number)
    allocator.allocate(20, 6 * MIB)
    assert allocator.reserved == LARGE_SEGMENT, "three neighbours make one block of six"


sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(SMALL_REQUEST - 1024, SMALL_REQUEST + 1024),
    st.integers(1, 40 * MIB),
    st.sampled_from([MIN_LARGE_REQUEST - 512, MIN_LARGE_REQUEST, MIN_LARGE_REQUEST + 1]),
)


@given(st.lists(st.tuples(sizes, st.integers(0, 30)), max_size=60), st.booleans())
def test_any_sequence(requests: list[tuple[int, int]], expandable: bool) -> None:
    """Bytes are conserved, blocks never overlap, peaks are reached, and everything merges back in the end."""
    allocator = CachingAllocator(expandable=expandable)
    held: dict[int, int] = {}
    highest = [0, 0, 0]
    for number, (size, victim) in enumerate(requests):
        allocator.allocate(number, size)
        held[number] = size
        if victim in held:
            allocator.free(victim)
            del held[victim]
        taken = sorted((block.address, block.address + block.n_bytes) for block, _ in allocator._taken.values())
        assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:], strict=False))
        assert allocator.requested == sum(held.values())
        assert allocator.requested <= allocator.allocated <= allocator.reserved
        free = sum(size for pool in allocator._free.values() for size, _, _ in pool)
        assert allocator.allocated + free == allocator.reserved
    highest = [allocator.peak_requested, allocator.peak_allocated, allocator.peak_reserved]
    assert highest[0] <= highest[1] <= highest[2] == allocator.reserved
    for number in list(held):
        allocator.free(number)
    assert allocator.requested == allocator.allocated == 0
    for pool in allocator._free.values():
        for size, _, block in pool:
            assert size == block.n_bytes and (block.before is None and block.after is None)


def test_replay_is_the_same_as_calling() -> None:
    allocator = CachingAllocator()
    allocator.replay([(0, 1, 3 * MIB), (1, 2, 5 * MIB), (2, 1, -3 * MIB), (3, 3, 512)])
    assert allocator.requested == 5 * MIB + 512
    allocator.reset_peaks()
    assert allocator.peak_requested == allocator.requested
