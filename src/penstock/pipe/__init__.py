"""What a user holds: `pipeline()` makes a `Pipeline`, whose verbs run steps; options, results, groups, scaling.

>>> import penstock, torch
>>> x, model = torch.randn(8, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
>>> with penstock.pipeline(model, (x,), loss_fn=torch.nn.functional.mse_loss, ranks=2, microbatches=4) as pipe:
...     result = pipe.step(x, target=x)
>>> torch.isclose(result.loss, torch.nn.functional.mse_loss(model(x), x)).item()
True
"""
