"""Turns stages, a schedule and a transport into training steps.

From the top down: `step`, `model`, `execute`, `features`; then `loss`, `split_backward` and `batch`; `gradients`;
`transport`; `exact`.
"""
