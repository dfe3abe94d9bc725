"""The model of CUDA's caching allocator: its rules one by one, and invariants under random use."""

from __future__ import annotations

import itertools
import random

import pytest

from lowmem.memory.allocator import MIB, Block, CachingAllocator, OutOfCapacityError, replay


def reserved_by(*sizes: int, expandable: bool = False) -> int:
    allocator = CachingAllocator(expandable=expandable)
    for size in sizes:
        allocator.allocate(size)
    return allocator.reserved


def test_sizes_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(1).size == 512
    assert allocator.allocate(513).size == 1024
    assert allocator.allocated == 1536


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),  # the small pool
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),  # shares a segment of 20 MiB
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # a segment of its own, rounded to 2 MiB
        (33 * MIB + 1, 34 * MIB),
    ],
)
def test_the_segment_a_request_gets(size: int, reserved: int) -> None:
    assert reserved_by(size) == reserved


def test_small_requests_share_a_segment_and_large_ones_leave_small_rests_unsplit() -> None:
    assert reserved_by(*[512 * 1024] * 4) == 2 * MIB
    allocator = CachingAllocator()
    block = allocator.allocate(10 * MIB)
    allocator.free(block)
    again = allocator.allocate(10 * MIB - MIB)  # 1 MiB would remain: not split
    assert again.size == 10 * MIB
    allocator.free(again)
    assert allocator.allocate(9 * MIB - 512).size == 9 * MIB - 512  # a little more remains: split


def test_the_smallest_block_that_fits_is_taken_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    small, large = allocator.allocate(12 * MIB), allocator.allocate(40 * MIB)
    allocator.free(small)
    allocator.free(large)
    assert allocator.allocate(11 * MIB + 512).address == small.address
    first = allocator.allocate(20 * MIB)
    second = allocator.allocate(20 * MIB)
    assert (first.address, allocator.reserved) == (large.address, 52 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(40 * MIB).address == large.address
    assert allocator.reserved == 52 * MIB


def test_what_is_cached_goes_back_for_a_request_that_does_not_fit() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(50 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 50 * MIB)
    with pytest.raises(OutOfCapacityError, match="do not fit"):
        allocator.allocate(20 * MIB)


def test_expandable_segments_grow_by_pages_and_never_fragment_at_their_end() -> None:
    assert reserved_by(MIB, expandable=True) == 2 * MIB
    assert reserved_by(3 * MIB, expandable=True) == 20 * MIB
    assert reserved_by(15 * MIB, 15 * MIB, 15 * MIB, expandable=True) == 60 * MIB
    allocator = CachingAllocator(expandable=True)
    block = allocator.allocate(30 * MIB)
    allocator.free(block)
    allocator.allocate(70 * MIB)  # the free end grows; by default this would be a second segment
    assert allocator.reserved == 80 * MIB


def test_a_hole_is_unmapped_and_mapped_again() -> None:
    allocator = CachingAllocator(expandable=True)
    first, middle, last = (allocator.allocate(40 * MIB) for _ in range(3))
    allocator.free(middle)
    assert allocator.empty_cache() == 40 * MIB
    assert allocator.reserved == 80 * MIB
    again = allocator.allocate(40 * MIB)
    assert (again.address, allocator.reserved) == (middle.address, 120 * MIB)
    for block in (first, again, last):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_what_can_grow_counts_as_large() -> None:
    """A larger hole is taken before the smaller free block at the end, which the next large request may need."""
    allocator = CachingAllocator(expandable=True)
    hole, _, end = (allocator.allocate(size * MIB) for size in (60, 20, 40))
    allocator.free(hole)
    allocator.free(end)
    assert allocator.allocate(30 * MIB).address == hole.address


@pytest.mark.parametrize("expandable", [False, True])
def test_invariants_hold_under_random_use(expandable: bool) -> None:
    rng = random.Random(0)
    allocator = CachingAllocator(expandable=expandable)
    live: list[tuple[Block, int]] = []
    for step in range(4000):
        if live and rng.random() < 0.5:
            allocator.free(live.pop(rng.randrange(len(live)))[0])
        else:
            size = int(2 ** rng.uniform(4, 26))
            live.append((allocator.allocate(size), size))
        if rng.random() < 0.01:
            allocator.empty_cache()
        if step % 100 == 0:
            _check(allocator, live)
    for block, _ in live:
        allocator.free(block)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def _check(allocator: CachingAllocator, live: list[tuple[Block, int]]) -> None:
    spans = sorted((block.address, block.address + block.size) for block, _ in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(block.size >= size and not block.free for block, size in live)
    free = [block for pool in (allocator._small, allocator._large) for _, _, block in pool.blocks]
    assert allocator.allocated == sum(block.size for block, _ in live)
    assert allocator.reserved == allocator.allocated + sum(block.size for block in free)
    assert allocator.peak_reserved >= allocator.peak_allocated
    for block in free:  # nothing that could merge stands apart
        assert block.next is None or not block.next.free or not block.next.mapped


def test_replay_feeds_births_and_deaths() -> None:
    allocator = replay(
        [(0, 12 * MIB), (1, 30 * MIB), (0, -12 * MIB), (2, 0), (2, 0), (3, 12 * MIB)], CachingAllocator()
    )
    assert allocator.peak_allocated == 42 * MIB
    assert allocator.peak_reserved == 42 * MIB
