"""The debug mode for units that only some ranks run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from walk_toys import Block, Decoder, ids, sharded

from shardwalk.parallelizer_core import check_unit_order
from shardwalk.parallelizer_core.testing import RankError, RankPool, run_on_ranks


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList([Block()])
        self.trunk = nn.ModuleList([Block()])

    def forward(self, x, with_tower):
        return self.trunk[0](self.tower[0](x) if with_tower else x)


def one_rank_skips(dp_replicate_size=None, checked=True, skipper=1):
    model = sharded(Optional, dp_replicate_size=dp_replicate_size)
    x = torch.ones(2, 6)
    model(x, True)
    if not checked:
        return model(x, dist.get_rank() != skipper).sum().backward()
    with check_unit_order(model):
        model(x, True)
        with pytest.raises(RuntimeError) as error:
            model(x, dist.get_rank() != skipper)
    model(x, True).sum().backward()
    return str(error.value)


@pytest.mark.parametrize(("world", "replicas"), [(2, None), (4, 2)])
def test_every_rank_hears_which_unit_each_was_about_to_run(world, replicas):
    messages = run_on_ranks(world, one_rank_skips, replicas)
    assert len(set(messages)) == 1
    assert "rank 0: tower.0" in messages[0]
    assert "rank 1: trunk.0" in messages[0]


def test_without_it_the_ranks_do_not_survive():
    with RankPool(2, timeout=12, collective_timeout=3) as pool, pytest.raises(RankError):
        pool.run(one_rank_skips, None, checked=False)


def not_sharded():
    with check_unit_order(Decoder()):
        Decoder()(ids())


def test_a_model_without_units_is_refused():
    with pytest.raises(ValueError, match="strategy='fsdp2'"):
        not_sharded()
