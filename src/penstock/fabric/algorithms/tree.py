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

from penstock.fabric.steps import Move, StepList

Parents = tuple[int, ...]
"""The parent of each rank; the root is its own parent."""


def all_reduce(ranks: int, pieces: int = 8) -> StepList:
    """Sums go up and results come down, piece by piece: 2h + pieces - 1 rounds for trees of height h.

    Args:
        ranks: any number.
        pieces: the number of pieces into which each half is cut. More fill the ports better, but take more rounds.
    """
    trees = double_tree(ranks)
    depths = [tuple(_depth(tree, rank) for rank in range(ranks)) for tree in trees]
    height = max(depths[0])
    rounds: list[list[Move]] = [[] for _ in range(2 * height + pieces - 1)]
    for half, (tree, depth) in enumerate(zip(trees, depths, strict=True)):
        for rank, parent in enumerate(tree):
            if rank == parent:
                continue
            for piece in range(pieces):
                slot = half * pieces + piece
                rounds[piece + height - depth[rank]].append(Move(rank, parent, slot, 1, slot, adds=True))
                rounds[piece + height + depth[rank] - 1].append(Move(parent, rank, slot, 1, slot))
    chunks = 2 * pieces
    return StepList("all_reduce", "tree", ranks, chunks, chunks, tuple(tuple(sorted(moves)) for moves in rounds))


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
