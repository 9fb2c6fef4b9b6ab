"""``shard_meta_for_dp``: one batch for several data-parallel ranks, planned from lengths alone.

The driver decides from the meta which rank gets which samples, and each rank then reads only its own. No
tensor is touched here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        meta: The batch. Its ``sequence_lengths`` are balanced; without them only the counts are.
        dp_world: The number of ranks.
        batch_size: The samples of one training step, over all ranks. The batch is cut into steps in its
            order, each step is balanced by itself, and each rank has its rows of the steps one after the
            other. None: one step.
        sequence_packing_args: Also pack each rank's samples of a step into micro-batches that hold at most
            ``max_tokens_per_microbatch`` tokens together, each sample rounded up to
            ``sequence_length_pad_multiple`` (1). In each step all ranks get the same number of
            micro-batches.
        dynamic_batching_args: The same for micro-batches that are padded: the number of samples times the
            longest, rounded up to ``sequence_length_round`` (1), is at most ``max_tokens_per_microbatch``.

    Returns:
        The metas by rank, and the inverse permutation: ``inverse[i]`` is where sample ``i`` went in the
        concatenation of the ranks, so ``torch.cat(results_of_ranks)[inverse]`` is in the order of ``meta``.

        With packing or dynamic batching, each meta's ``extra_info`` has, for each step, its
        ``micro_batch_indices``, pairs ``[start, stop]`` of rows for ``KVBatchMeta.slice``, and its
        ``micro_batch_lengths``, the tokens of each as computed. A rank that has fewer samples in a step
        than another has micro-batches (only possible when the step does not divide by ``dp_world``) gets
        empty ones, because ranks that disagree on the number would wait for each other for ever.

    Raises:
        ValueError: An argument is out of range or unknown, packing is asked for without lengths, or a
            sample is longer than a micro-batch may be.
    """
    if type(dp_world) is not int or dp_world < 1:
        raise InvalidRequestError(f"dp_world is a whole number of at least 1; got {dp_world!r}")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise InvalidRequestError(f"batch_size is None or a whole number of at least 1; got {batch_size!r}")
    batching = _batching(meta, sequence_packing_args, dynamic_batching_args)
    lengths = meta.sequence_lengths or [1] * meta.size

    ranks = [_Rank() for _ in range(dp_world)]
    step = batch_size or max(meta.size, 1)
    for start in range(0, meta.size, step):
        shares = _balance(range(start, min(start + step, meta.size)), lengths, ranks)
        if batching is None:
            for rank, share in zip(ranks, shares, strict=True):
                rank.rows += sorted(share)
        else:
            _add_micro_batches(ranks, [batching.pack(share) for share in shares], batching)

    order = [row for rank in ranks for row in rank.rows]
    inverse = [0] * meta.size
    for position, row in enumerate(order):
        inverse[row] = position
    return [_rank_meta(meta, rank, batching is not None) for rank in ranks], inverse


@dataclass
class _Rank:
    """What one rank has been given so far: rows of the meta, and its micro-batches by step."""

    rows: list[int] = field(default_factory=list)
    indices: list[list[list[int]]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Batching:
    """How rows become micro-batches: what a list of rows costs, and lists that each fit the limit."""

    cost: Callable[[Sequence[int]], int]
    pack: Callable[[Sequence[int]], list[list[int]]]


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


def _add_micro_batches(
    ranks: Sequence[_Rank], packed: Sequence[list[list[int]]], batching: _Batching
) -> None:
    count = max(len(bins) for bins in packed)
    for rank, bins in zip(ranks, packed, strict=True):
        indices, tokens = [], []
        for rows in _split_to(bins, count, batching):
            begin = len(rank.rows)
            rank.rows += rows
            indices.append([begin, len(rank.rows)])
            tokens.append(batching.cost(rows))
        rank.indices.append(indices)
        rank.tokens.append(tokens)


def _split_to(bins: list[list[int]], count: int, batching: _Batching) -> list[list[int]]:
    """Halve the costliest micro-batches until there are ``count``, costliest first.

    In that order the ranks' first micro-batches are alike, and so on: they wait less for each other.
    """
    heap = [(-batching.cost(rows), rows) for rows in bins]
    heapq.heapify(heap)
    done: list[tuple[int, list[int]]] = []
    while heap and len(heap) + len(done) < count:
        cost, rows = heapq.heappop(heap)
        if len(rows) == 1:
            done.append((cost, rows))
            continue
        # Every other row: they are sorted by length, so the halves are alike.
        for half in (rows[::2], rows[1::2]):
            heapq.heappush(heap, (-batching.cost(half), half))
    ordered = [rows for _, rows in sorted(heap + done)]
    return ordered + [[] for _ in range(count - len(ordered))]


def _rank_meta(meta: KVBatchMeta, rank: _Rank, batched: bool) -> KVBatchMeta:
    shard = meta.subset(rank.rows)
    if not batched:
        return shard
    plan = {"micro_batch_indices": rank.indices, "micro_batch_lengths": rank.tokens}
    return replace(shard, extra_info={**shard.extra_info, **plan})


def _batching(
    meta: KVBatchMeta, packing: Mapping[str, Any] | None, dynamic: Mapping[str, Any] | None
) -> _Batching | None:
    if packing is None and dynamic is None:
        return None
    if packing is not None and dynamic is not None:
        raise InvalidRequestError("give sequence_packing_args or dynamic_batching_args, not both")
    if meta.sequence_lengths is None:
        raise InvalidRequestError("micro-batches are planned by length, and the meta has no sequence_lengths")
    if packing is not None:
        algorithm = packing.get("algorithm", "first_fit_decreasing")
        if algorithm not in _ALGORITHMS:
            raise InvalidRequestError(
                f"algorithm is one of {', '.join(sorted(_ALGORITHMS))}; got {algorithm!r}"
            )
        limit, rounded = _limits(meta, packing, "sequence_length_pad_multiple", {"algorithm"})
        return _Batching(
            cost=lambda rows: sum(rounded[row] for row in rows),
            pack=lambda rows: _best_fit_decreasing(rows, rounded, limit),
        )
    limit, rounded = _limits(meta, dynamic or {}, "sequence_length_round", set())
    return _Batching(
        cost=lambda rows: len(rows) * max((rounded[row] for row in rows), default=0),
        pack=lambda rows: _fill_padded(rows, rounded, limit),
    )


def _limits(
    meta: KVBatchMeta, arguments: Mapping[str, Any], multiple_key: str, also: set[str]
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
    rounded = [-(-length // multiple) * multiple for length in meta.sequence_lengths or ()]
    if rounded and max(rounded) > limit:
        row = rounded.index(max(rounded))
        raise InvalidRequestError(
            f"sample {meta.sample_ids[row]!r} takes {rounded[row]} tokens, more than"
            f" max_tokens_per_microbatch={limit}"
        )
    return limit, rounded


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


def _fill_padded(rows: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Longest first, so that the first row of a micro-batch is what its others are padded to."""
    bins: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= limit:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins
