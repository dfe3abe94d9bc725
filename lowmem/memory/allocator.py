"""A model of PyTorch's CUDA caching allocator: what a stream of allocations makes it reserve.

After `c10/cuda/CUDACachingAllocator.cpp` (PyTorch 2.13, BSD-3-Clause), one stream, no CUDA graphs, no threshold for
garbage collection. Sizes are rounded to 512 bytes. By default a request of up to 1 MiB comes out of a 2 MiB segment,
one below 10 MiB out of a 20 MiB segment, and a larger one gets a segment of its own, rounded to 2 MiB; free neighbours
of one segment merge; the smallest free block that holds a request is taken. With expandable segments, each pool is one
range of addresses that grows by pages (2 MiB, 20 MiB).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from lowmem.errors import UserError

MIB = 2**20
ROUND = 512
SMALL = MIB  # largest request of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
MIN_OWN_SEGMENT = 10 * MIB  # from here on a request has a segment of its own
OWN_SEGMENT_ROUND = 2 * MIB


class OutOfCapacityError(UserError):
    """The request does not fit, also after everything cached was given back."""


class Block:
    """A piece of a segment: handed out, free, or (expandable segments) not backed by memory."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.free = True
        self.prev: Block | None = None
        self.next: Block | None = None


class Pool:
    """Free blocks by size, then address; addresses without memory by address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.blocks: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []

    @property
    def page(self) -> int:
        """Bytes by which an expandable segment grows."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def insert(self, block: Block) -> None:
        """Put a free block into its list."""
        insort(self._list(block), self._entry(block), key=_place)

    def remove(self, block: Block) -> None:
        """Take a block out of its list."""
        where = self._list(block)
        index = bisect_left(where, self._entry(block)[:2], key=_place)
        assert where[index][2] is block
        del where[index]

    def _list(self, block: Block) -> list[tuple[int, int, Block]]:
        return self.blocks if block.mapped else self.unmapped

    @staticmethod
    def _entry(block: Block) -> tuple[int, int, Block]:
        return (block.size, block.address, block) if block.mapped else (block.address, block.size, block)


def _place(entry: tuple[int, int, Block]) -> tuple[int, int]:
    return entry[:2]


class CachingAllocator:
    """Hands out blocks and counts bytes.

    Args:
        capacity: bytes that may be reserved; null: no bound.
        expandable: as with `PYTORCH_ALLOC_CONF=expandable_segments:True`.

    Attributes:
        allocated, reserved: bytes now (allocated counts rounded sizes).
        peak_allocated, peak_reserved: the most there ever were.
        retries: how often everything cached had to be given back for a request.
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._small, self._large = Pool(True), Pool(False)
        self._address = 0  # of the next segment

    def allocate(self, size: int) -> Block:
        """A block for `size` bytes.

        Raises:
            OutOfCapacityError: it does not fit.
        """
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = self._small if size <= SMALL else self._large
        block = self._fitting(pool, size) or self._more(pool, size)
        if block is None and self.empty_cache():
            self.retries += 1
            block = self._more(pool, size)
        if block is None:
            raise OutOfCapacityError(
                f"{size:,} bytes do not fit: {self.allocated:,} are allocated, {self.reserved:,} reserved of "
                f"{self.capacity:,}"
            )
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Take a block back into the cache, merged with free neighbours."""
        assert not block.free
        self.allocated -= block.size
        block.free = True
        block.pool.insert(self._merged(block))

    def empty_cache(self) -> int:
        """Give segments that are wholly free (with expandable segments: free pages) back; returns their bytes."""
        given = 0
        for pool in (self._small, self._large):
            for _, _, block in list(pool.blocks):
                given += self._unmap(block) if self.expandable else self._give_back(block)
        self.reserved -= given
        return given

    # -- finding and making blocks ------------------------------------------------------------------------------------

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        blocks = pool.blocks
        index = bisect_left(blocks, (size, -1), key=_place)
        if index == len(blocks):
            return None
        if self.expandable:  # a block before unmapped addresses counts as large as it can grow
            while index + 1 < len(blocks) and _can_grow_to(blocks[index + 1][2]) < _can_grow_to(blocks[index][2]):
                index += 1
        return blocks.pop(index)[2]

    def _more(self, pool: Pool, size: int) -> Block | None:
        return self._grown(pool, size) if self.expandable else self._segment(pool, size)

    def _segment(self, pool: Pool, size: int) -> Block | None:
        if size <= SMALL:
            bytes_ = SMALL_SEGMENT
        elif size < MIN_OWN_SEGMENT:
            bytes_ = LARGE_SEGMENT
        else:
            bytes_ = -(-size // OWN_SEGMENT_ROUND) * OWN_SEGMENT_ROUND
        if not self._reserve(bytes_):
            return None
        block = Block(pool, self._address, bytes_)
        self._address += bytes_ + ROUND  # a gap, so that segments never touch
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` at the end of mapped memory, or in a hole, made by mapping pages."""
        block = self._room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # it has taken in the block before it
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int) -> Block:
        for _, _, hole in pool.unmapped:
            start = hole.prev if hole.prev is not None and hole.prev.free and hole.prev.mapped else hole
            room, piece = 0, start
            while piece is not None and piece.free and room < size:
                room += piece.size
                piece = piece.next  # type: ignore[assignment]
            if room >= size:
                return start
        block = Block(pool, self._address, 2**50, mapped=False)
        self._address += 2**51
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the start of an unmapped block with pages, and merge it with what is free around it."""
        pool = block.pool
        end = -(-(block.address + size) // pool.page) * pool.page
        bytes_ = min(end - block.address, block.size)
        if not self._reserve(bytes_):
            return False
        pool.remove(block)
        if bytes_ < block.size:
            pool.insert(self._cut(block, bytes_))
        block.mapped = True
        pool.insert(self._merged(block))
        return True

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    # -- cutting and merging ------------------------------------------------------------------------------------------

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left >= ROUND if block.pool.small or self.expandable else left > SMALL:
            block.pool.insert(self._cut(block, size))

    @staticmethod
    def _cut(block: Block, size: int) -> Block:
        """Shorten a block to `size`; returns the rest, which is in no list."""
        rest = Block(block.pool, block.address + size, block.size - size, block.mapped)
        block.size = size
        rest.prev, rest.next, block.next = block, block.next, rest
        if rest.next is not None:
            rest.next.prev = rest
        return rest

    @staticmethod
    def _merged(block: Block) -> Block:
        """The block together with free neighbours of its kind, which leave their lists."""
        for other in (block.prev, block.next):
            if other is None or not other.free or other.mapped != block.mapped:
                continue
            block.pool.remove(other)
            if other is block.prev:
                block.address, block.prev = other.address, other.prev
                if block.prev is not None:
                    block.prev.next = block
            else:
                block.next = other.next
                if block.next is not None:
                    block.next.prev = block
            block.size += other.size
        return block

    # -- giving back --------------------------------------------------------------------------------------------------

    def _give_back(self, block: Block) -> int:
        if block.prev is not None or block.next is not None:
            return 0
        block.pool.remove(block)
        return block.size

    def _unmap(self, block: Block) -> int:
        """Whole free pages lose their memory; their addresses stay."""
        pool = block.pool
        first = -(-block.address // pool.page) * pool.page
        last = (block.address + block.size) // pool.page * pool.page
        if last <= first:
            return 0
        pool.remove(block)
        if first > block.address:
            hole = self._cut(block, first - block.address)
            pool.insert(block)
        else:
            hole = block
        if last < hole.address + hole.size:
            pool.insert(self._cut(hole, last - hole.address))
        hole.mapped = False
        pool.insert(self._merged(hole))
        return last - first


def _can_grow_to(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def replay(events: Iterable[tuple[int, int]], allocator: CachingAllocator) -> CachingAllocator:
    """Feed births and deaths of storages to an allocator.

    Args:
        events: (number of the storage, bytes), negative bytes for a death; storages without bytes are passed over.
        allocator: is changed and returned.
    """
    live: dict[int, Block] = {}
    for number, size in events:
        if size > 0:
            live[number] = allocator.allocate(size)
        elif number in live:
            allocator.free(live.pop(number))
    return allocator
