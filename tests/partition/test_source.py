"""Whose code a file holds."""

from penstock import compat, trees
from penstock.demo import mlp_training
from penstock.partition import source
from penstock.partition.recorder import recorder


def test_only_what_records_is_ours() -> None:
    assert all(source.is_ours(str(module.__file__)) for module in (compat, trees, recorder))
    assert not source.is_ours(str(mlp_training.__file__))
    assert not source.is_ours(__file__)
