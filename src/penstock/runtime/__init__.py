"""Stages, a schedule and a transport become training steps.

From the top down: `step`, `model`, `execute`, `features`; then `loss`, `split_backward` and `batch`; `gradients`;
`transport`; `exact` and `processes`.
"""
