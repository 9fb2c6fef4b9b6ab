"""``shard_meta_for_dp``: one batch for several data-parallel ranks, planned from lengths alone.

The driver decides from the meta which rank gets which samples, and each rank then reads only its own. No
tensor is touched here. Arguments and results are those of NeMo-RL's ``shard_meta_for_dp``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

from rlplane.errors import InvalidRequestError
from rlplane.interfaces import KVBatchMeta

__all__ = ["shard_meta_for_dp"]

# The names that NeMo-RL's configs use. All are served by best-fit-decreasing, which is never worse than
# their common guarantee of 11/9 of the fewest possible micro-batches (plus one).
_ALGORITHMS = {
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
}
_ORDERS = {None, "packer", "largest_first"}
_IGNORED = {"input_key", "input_lengths_key"}  # the lengths are those of the meta


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
) -> tuple[list[KVBatchMeta], list[int]]:
    """Split ``meta`` over ``dp_world`` ranks, balanced by sequence length.

    Every sample goes to exactly one rank. The ranks' numbers of samples differ by at most one, so they are
    equal when ``dp_world`` divides them; and if it does, the ranks' numbers of tokens in one step differ by
    no more than the longest sample from the shortest.

    Args:
        meta: The batch, with ``sequence_lengths``.
        dp_world: The number of ranks.
        batch_size: The samples of one training step, over all ranks. The batch is cut into steps in its
            order, each step is balanced by itself, and each rank has its rows of the steps one after the
            other. None: one step.
        sequence_packing_args: Also pack each rank's samples of a step into micro-batches that hold at most
            ``max_tokens_per_microbatch`` tokens together, each sample rounded up to
            ``sequence_length_pad_multiple`` (1). In each step all ranks get the same number of
            micro-batches: in the order in which they were packed, or with
            ``microbatch_order="largest_first"`` sorted by their tokens, so that the ranks' first ones are
            alike, and the allocator finds memory for every later one.
        dynamic_batching_args: The same for micro-batches that are padded: the number of samples times the
            longest, rounded up to ``sequence_length_round`` (1), is at most ``max_tokens_per_microbatch``.
            The n-th micro-batches of all ranks have the same number of samples, padded to the same length.

    Returns:
        The metas by rank, and the inverse permutation: ``inverse[i]`` is where sample ``i`` went in the
        concatenation of the ranks, so ``torch.cat(results_of_ranks)[inverse]`` is in the order of ``meta``.

        With packing or dynamic batching, each meta's ``extra_info`` has, for each step, its
        ``micro_batch_indices``, pairs ``[start, stop]`` of rows counted from the first row of the step; its
        ``micro_batch_lengths``, the tokens of each packed micro-batch, or the length to which each dynamic
        one is padded; and in ``elem_counts_per_gb`` the number of its rows. A rank that has fewer samples in
        a step than another has micro-batches (only possible when the step does not divide by ``dp_world``)
        gets empty ones, because ranks that disagree on the number would wait for each other for ever.

    Raises:
        ValueError: The meta has no samples or no lengths, an argument is out of range or unknown, or a sample
            is longer than a micro-batch may be.
    """
    if type(dp_world) is not int or dp_world < 1:
        raise InvalidRequestError(f"dp_world is a whole number of at least 1; got {dp_world!r}")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise InvalidRequestError(f"batch_size is None or a whole number of at least 1; got {batch_size!r}")
    if not meta.size:
        raise InvalidRequestError("the meta is empty: there is nothing to shard")
    lengths = meta.sequence_lengths
    if lengths is None:
        raise InvalidRequestError("ranks are balanced by length, and the meta has no sequence_lengths")
    batching = _batching(meta, lengths, sequence_packing_args, dynamic_batching_args)

    ranks = [_Rank() for _ in range(dp_world)]
    step = batch_size or meta.size
    for start in range(0, meta.size, step):
        shares = _balance(range(start, min(start + step, meta.size)), lengths, ranks)
        if batching is None:
            for rank, share in zip(ranks, shares, strict=True):
                rank.rows += sorted(share)
        else:
            for rank, micro_batches in zip(ranks, batching(shares), strict=True):
                rank.add_step(micro_batches)

    order = [row for rank in ranks for row in rank.rows]
    inverse = [0] * meta.size
    for position, row in enumerate(order):
        inverse[row] = position
    return [_rank_meta(meta, rank, batching is not None) for rank in ranks], inverse


@dataclass
class _MicroBatch:
    rows: list[int]
    length: int


_Batching = Callable[[list[list[int]]], list[list[_MicroBatch]]]
"""How the rows that the ranks have in a step become micro-batches, equally many for each rank."""


@dataclass
class _Rank:
    """What one rank has been given so far: rows of the meta, and its micro-batches by step."""

    rows: list[int] = field(default_factory=list)
    indices: list[list[list[int]]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add_step(self, micro_batches: list[_MicroBatch]) -> None:
        stops = list(accumulate(len(batch.rows) for batch in micro_batches))
        self.rows += [row for batch in micro_batches for row in batch.rows]
        self.indices.append([[start, stop] for start, stop in zip([0, *stops], stops, strict=False)])
        self.lengths.append([batch.length for batch in micro_batches])
        self.counts.append(stops[-1])


def _balance(rows: range, lengths: Sequence[int], ranks: Sequence[_Rank]) -> list[list[int]]:
    """Deal the rows of one step: longest first, in rounds in which every rank gets one.

    In a round the longest goes to the rank with the fewest tokens. The first round is the short one, if
    there is one; who is left out is whoever has more samples from earlier steps.
    """
    dealt = sorted(rows, key=lambda row: -lengths[row])
    world = len(ranks)
    loads = [0] * world
    shares: list[list[int]] = [[] for _ in range(world)]
    first = len(dealt) % world
    for begin in range(first - world if first else 0, len(dealt), world):
        batch = dealt[max(begin, 0) : begin + world]
        takers = sorted(range(world), key=lambda r: (len(ranks[r].rows), r))[: len(batch)]
        takers.sort(key=lambda r: loads[r])
        for rank, row in zip(takers, batch, strict=True):
            shares[rank].append(row)
            loads[rank] += lengths[row]
    return shares


def _rank_meta(meta: KVBatchMeta, rank: _Rank, batched: bool) -> KVBatchMeta:
    shard = meta.subset(rank.rows)
    if not batched:
        return shard
    plan = {
        "micro_batch_indices": rank.indices,
        "micro_batch_lengths": rank.lengths,
        "elem_counts_per_gb": rank.counts,
    }
    return replace(shard, extra_info={**shard.extra_info, **plan})


def _batching(
    meta: KVBatchMeta,
    lengths: Sequence[int],
    packing: Mapping[str, Any] | None,
    dynamic: Mapping[str, Any] | None,
) -> _Batching | None:
    if packing is not None and dynamic is not None:
        raise InvalidRequestError("give sequence_packing_args or dynamic_batching_args, not both")
    if packing is not None:
        for name, known, value in (
            ("algorithm", _ALGORITHMS, packing.get("algorithm", "first_fit_decreasing")),
            ("microbatch_order", _ORDERS, packing.get("microbatch_order")),
        ):
            if value not in known:
                there = ", ".join(sorted(filter(None, known)))
                raise InvalidRequestError(f"{name} is one of {there}; got {value!r}")
        also = {"algorithm", "microbatch_order"}
        limit, rounded = _limits(meta, lengths, packing, "sequence_length_pad_multiple", also)
        largest_first = packing.get("microbatch_order") == "largest_first"
        return partial(_packed, lengths=rounded, limit=limit, largest_first=largest_first)
    if dynamic is not None:
        limit, rounded = _limits(meta, lengths, dynamic, "sequence_length_round", set())
        return partial(_padded, lengths=rounded, limit=limit)
    return None


def _limits(
    meta: KVBatchMeta, lengths: Sequence[int], arguments: Mapping[str, Any], multiple_key: str, also: set[str]
) -> tuple[int, list[int]]:
    """The most tokens of a micro-batch, and each row's length rounded up as it will be computed."""
    known = {"max_tokens_per_microbatch", multiple_key} | also | _IGNORED
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise InvalidRequestError(f"unknown argument {unknown[0]!r}; there are {', '.join(sorted(known))}")
    limit, multiple = arguments.get("max_tokens_per_microbatch"), arguments.get(multiple_key, 1)
    for name, value in (("max_tokens_per_microbatch", limit), (multiple_key, multiple)):
        if type(value) is not int or value < 1:
            raise InvalidRequestError(f"{name} is a whole number of at least 1; got {value!r}")
    assert type(limit) is int
    rounded = [-(-length // multiple) * multiple for length in lengths]
    if max(rounded) > limit:
        row = rounded.index(max(rounded))
        raise InvalidRequestError(
            f"sample {meta.sample_ids[row]!r} takes {rounded[row]} tokens, more than"
            f" max_tokens_per_microbatch={limit}"
        )
    return limit, rounded


def _packed(
    shares: list[list[int]], *, lengths: Sequence[int], limit: int, largest_first: bool
) -> list[list[_MicroBatch]]:
    """Rows laid end to end: each rank packs its own, and splits the fullest until all have equally many."""

    def total(rows: Sequence[int]) -> int:
        return sum(lengths[row] for row in rows)

    packed = [_best_fit_decreasing(rows, lengths, limit) for rows in shares]
    count = max(map(len, packed))
    ranks = [[_MicroBatch(rows, total(rows)) for rows in _split_to(bins, count, total)] for bins in packed]
    if largest_first:
        for micro_batches in ranks:
            micro_batches.sort(key=lambda batch: -batch.length)
    return ranks


def _best_fit_decreasing(rows: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Longest first, each into the fullest micro-batch that still has room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        found = bisect_left(room, (lengths[row], -1))
        if found == len(room):
            bins.append([])
            left, chosen = limit, len(bins) - 1
        else:
            left, chosen = room.pop(found)
        bins[chosen].append(row)
        insort(room, (left - lengths[row], chosen))
    return bins


def _split_to(bins: list[list[int]], count: int, total: Callable[[Sequence[int]], int]) -> list[list[int]]:
    """Halve the fullest micro-batches until there are ``count``. The second halves come last."""
    bins = list(bins)
    fullest = [(-total(rows), place) for place, rows in enumerate(bins)]
    heapq.heapify(fullest)
    while fullest and len(bins) < count:
        _, place = heapq.heappop(fullest)
        rows = bins[place]
        if len(rows) > 1:
            # Every other row: they are sorted by length, so the halves are alike.
            bins[place] = rows[::2]
            bins.append(rows[1::2])
            for half in (place, len(bins) - 1):
                heapq.heappush(fullest, (-total(bins[half]), half))
    return bins + [[] for _ in range(count - len(bins))]


def _padded(shares: list[list[int]], *, lengths: Sequence[int], limit: int) -> list[list[_MicroBatch]]:
    """Rows padded to one length: all ranks cut at the same places, so that their shapes are the same.

    Longest first: the first row of a micro-batch is what its others are padded to.
    """
    ordered = [sorted(rows, key=lambda row: (-lengths[row], row)) for rows in shares]
    widths = [
        max(lengths[rows[place]] for rows in ordered if place < len(rows))
        for place in range(max(map(len, ordered)))
    ]
    starts = [0]
    for place in range(1, len(widths)):
        if (place - starts[-1] + 1) * widths[starts[-1]] > limit:
            starts.append(place)
    edges = list(zip(starts, [*starts[1:], len(widths)], strict=True))
    return [[_MicroBatch(rows[start:stop], widths[start]) for start, stop in edges] for rows in ordered]
