"""DualPipe and DualPipeV: two streams of microbatches in opposite directions, so that forwards hide backwards."""

from __future__ import annotations

from penstock.schedule.generators.slots import RowWriter
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Run two copies of the model: one goes down the ranks, the other up; each takes half the microbatches.

    With 4 ranks and 8 microbatches, one column per time slot (stages 4 to 7 are the second copy; the parts of an
    overlap are drawn one after the other):

        rank 0 | 0F0 0F1 0F2 7F4 7I4 7W4 7F5 0F3 7B5 7F6 0B0 7B6 7F7 0B1 7B7 0I2 0W2 0I3 0W3
        rank 1 | .   1F0 6F4 1F1 6F5 1F2 6B4 6F6 1B0 1F3 6B5 6F7 1B1 6B6 1B2 6I7 1I3 6W7 1W3
        rank 2 | .   5F4 2F0 5F5 2F1 5F6 2B0 2F2 5B4 5F7 2B1 2F3 5B5 2B2 5B6 2I3 5I7 2W3 5W7
        rank 3 | 4F4 4F5 4F6 3F0 3I0 3W0 3F1 4F7 3B1 3F2 4B4 3B2 3F3 4B5 3B3 4I6 4W6 4I7 4W7

    Rank r has stage r of the copy that goes down and stage p - 1 - r of the one that goes up. While both streams pass,
    a rank runs the forward of one together with the backward of the other: on a GPU the communication of each hides
    behind the computation of the other. The last forwards of one stream and the first backwards of the other fill each
    other's bubbles, and weight gradients fill what is left: (p/2 - 1)(FB + B - 3W) on every rank, with FB the time of
    an overlapped pair. A rank holds up to p + 1 microbatches' activations, and two copies of its parameters, whose
    gradients are added at the end.

    The steps of a rank are those of `_steps`, with h its distance from the nearer end and p/2 ranks to the middle.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section 3.2.1.
    """
    half, run = microbatches // 2, max(microbatches // 2, ranks)
    rows = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        near, far = (down, up) if rank < ranks // 2 else (up, down)
        out = RowWriter({up: half})  # the second copy's microbatches come after the first's
        _steps(out, near, far, min(rank, ranks - 1 - rank), ranks // 2, run)
        rows.append(out.within({down: range(half), up: range(half, microbatches)}))
    return Schedule("dualpipe", Placement.bidirectional(ranks), microbatches, rows)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: the ranks up to the middle do all the work, with two chunks each, placed as a V.

    With 2 ranks and 5 microbatches, one column per time slot (the parts of an overlap are drawn one after the other):

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 0W4
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4

    A DualPipe of 2p ranks is the same, seen from either end. Fold it in the middle and keep one side: what comes from
    the other direction is then the same microbatch on its way back up the V. There is one copy of the parameters; the
    bubble, (p - 1)(FB + B - 3W) in the times of chunks, is that of the whole; a rank holds the activations of up to
    2p + 1 chunks.

    Sea AI Lab, "DualPipe could be better without the Dual", 2025 (the "cut-in-half" schedule).
    """
    run = max(microbatches, 2 * ranks)
    rows = []
    for rank in range(ranks):
        out = RowWriter()
        _steps(out, rank, 2 * ranks - 1 - rank, rank, ranks, run)
        rows.append(out.within(dict.fromkeys((rank, 2 * ranks - 1 - rank), range(microbatches))))
    return Schedule("dualpipe-v", Placement.v(ranks), microbatches, rows)


def _steps(out: RowWriter, near: int, far: int, h: int, ranks: int, run: int) -> None:
    """Write the row of a rank that is `h` ranks from its end of the pipeline, with `ranks` from there to the middle.

    Microbatches come first to `near`, the stage in whose stream the rank comes early, and later to `far`. `run` of them
    go through each.

        step  times               what
        1     2(ranks - h - 1)    F near
        2     h + 1               F near, F far
        3     ranks - h - 1       I far, W, F far
        4     the rest            F near with B far, F far with B near
        5     ranks - h - 1       B far, F far with B near
        6     h + 1               B far, B near; the second half of these are I, whose W is left for later
        7     ranks - h - 1       W, I near
        8     h + 1               W
    """
    for _ in range(2 * (ranks - h - 1)):
        out.forward(near)
    for _ in range(h + 1):
        out.forward(near)
        out.forward(far)
    for _ in range(ranks - h - 1):
        out.input_gradient(far)
        out.weight_gradient()
        out.forward(far)
    for i in range(run - 2 * ranks + h + 1):
        if i == 0 and h == ranks - 1:  # in the middle the backward waits for the forward of the same microbatch
            out.forward(near)
            out.backward(far)
        else:
            out.overlap(near, far)
        out.overlap(far, near)
    for _ in range(ranks - h - 1):
        out.backward(far)
        out.overlap(far, near)
    for i in range(2 * (h + 1)):
        backward = out.backward if i < h + 1 else out.input_gradient
        backward(far if i % 2 == 0 else near)
    for _ in range(ranks - h - 1):
        out.weight_gradient()
        out.input_gradient(near)
    out.weight_gradients()
