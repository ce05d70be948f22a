"""A double binary tree, each tree carrying half of the data: an inner rank of one tree is a leaf of the other.

This way no port is idle, whereas half of the ports are idle in a single tree, and the latency grows only with log n
(Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009).

    n = 6, first tree      4th rank is its root      the second is its mirror image, or, for an odd n, the same
             3             (in order, so leaves are  tree shifted by one rank
           /   \\           at 0, 2, 4)
          1     5
         / \\   /
        0   2 4
"""

from __future__ import annotations

import numpy as np

from penstock.network.fabric.steps import PIECES, Move, StepList, Terms

Parents = tuple[int, ...]
"""The parent of each rank; the root is its own parent."""


def all_reduce(ranks: int) -> StepList:
    """Sums go up and results come down, piece by piece: 2h + k - 1 rounds for trees of height h, k pieces per half."""
    trees = double_tree(ranks)
    depths = [tuple(_depth(tree, rank) for rank in range(ranks)) for tree in trees]
    height = max(depths[0])
    rounds: list[list[Move]] = [[] for _ in range(2 * height + PIECES - 1)]
    for half, (tree, depth) in enumerate(zip(trees, depths, strict=True)):
        for rank, parent in enumerate(tree):
            if rank == parent:
                continue
            for piece in range(PIECES):
                slot = half * PIECES + piece
                rounds[piece + height - depth[rank]].append(Move(rank, parent, slot, 1, slot, adds=True))
                rounds[piece + height + depth[rank] - 1].append(Move(parent, rank, slot, 1, slot))
    chunks = 2 * PIECES
    return StepList("all_reduce", "tree", ranks, chunks, chunks, tuple(tuple(sorted(moves)) for moves in rounds))


def all_reduce_terms(n: int) -> Terms:
    """The double binary tree (Sanders, Speck and Träff, 2009), with k pieces per half: 2h + k - 1 rounds.

    h is floor(log2 n), the height. With four or more ranks and enough pieces, a port carries four of the 2k pieces in
    most rounds, but fewer in the first and last ones, so the busiest port of each round is counted. On an edge at depth
    d, sums go up from round h - d on, and results come down from round h + d - 1 on.
    """
    height, k = n.bit_length() - 1, PIECES
    changes = np.zeros((2, 2 * height + k, n), int)  # in what each port sends and receives, by round
    for tree in double_tree(n):
        parents, rank = np.array(tree), np.arange(n)
        depth, above = np.zeros(n, int), rank
        while np.any(moving := parents[above] != above):
            depth, above = depth + moving, parents[above]
        below = rank[parents != rank]
        parent, depth = parents[below], depth[below]
        for first, source, target in ((height - depth, below, parent), (height + depth - 1, parent, below)):
            for side, port in enumerate((source, target)):
                np.add.at(changes[side], (first, port), 1)
                np.add.at(changes[side], (first + k, port), -1)
    slots = changes.cumsum(1).max((0, 2)).sum()
    return Terms(2 * height + k - 1, int(slots) / (2 * k))


def double_tree(ranks: int) -> tuple[Parents, Parents]:
    """Returns both trees."""
    tree = tuple(_parent(place + 1, ranks) - 1 for place in range(ranks))
    last = ranks - 1
    if ranks % 2:
        other = tuple((tree[(rank - 1) % ranks] + 1) % ranks for rank in range(ranks))
    else:
        other = tuple(last - tree[last - rank] for rank in range(ranks))
    return tree, other


def _parent(place: int, places: int) -> int:
    """Returns the parent in the in-order tree of 1..places, where a number's lowest set bit is its height.

    All odd numbers are therefore leaves.
    """
    bit = place & -place
    above = (place ^ bit) | (bit << 1)
    return above if above <= places else (place ^ bit) or place


def _depth(tree: Parents, rank: int) -> int:
    depth = 0
    while tree[rank] != rank:
        rank, depth = tree[rank], depth + 1
    return depth
