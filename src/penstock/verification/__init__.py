"""The proof that a split model trains like the unsplit one: two models that share nothing, compared bit by bit.

>>> import torch
>>> from penstock import verify
>>> make = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
>>> x = torch.randn(8, 4)
>>> verify(make, (x,), target=x, loss_fn=torch.nn.functional.mse_loss, ranks=2, microbatches=4).ok
True
"""

from penstock._base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, {}, {"blame"})
