"""Which modules of a model are blocks."""

import pytest
from torch import nn

from shardwalk.parallelizer_core.layers import (
    find_block_stacks,
    frozen_towers,
    layer_groups,
)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x):
        return self.linear(x)


def names(model: nn.Module) -> dict[str, list[str]]:
    return {stack.name: [name for name, _ in stack.blocks] for stack in find_block_stacks(model)}


def holder(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def test_elements_of_lists_and_dicts_are_blocks_and_lists_inside_blocks_are_not():
    inner = holder(layers=nn.ModuleList([Block(), Block()]))
    model = holder(model=inner, stages=nn.ModuleDict({"a": Block(), "b": Block()}))
    assert names(model) == {
        "model.layers": ["model.layers.0", "model.layers.1"],
        "stages": ["stages.a", "stages.b"],
    }


def test_nested_containers_give_one_stack_each():
    model = holder(
        towers=nn.ModuleDict({
            "left": nn.ModuleList([Block(), Block()]),
            "right": nn.ModuleList([Block()]),
        })
    )
    assert names(model) == {
        "towers.left": ["towers.left.0", "towers.left.1"],
        "towers.right": ["towers.right.0"],
    }


def test_a_model_may_be_a_stack_itself():
    assert names(nn.Sequential(Block(), Block())) == {"": ["0", "1"]}


def test_a_block_that_stands_twice_is_one_block():
    block = Block()
    model = holder(layers=nn.ModuleList([block, block, Block()]))
    assert names(model) == {"layers": ["layers.0", "layers.2"]}


def test_elements_without_parameters_are_no_blocks():
    model = holder(layers=nn.ModuleList([Block(), nn.Dropout(0.0)]))
    assert names(model) == {"layers": ["layers.0"]}


@pytest.mark.parametrize(
    ("sequential", "expected"),
    [
        (nn.Sequential(Block(), Block()), ["s.0", "s.1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), None),
    ],
)
def test_a_sequential_is_a_stack_only_where_it_repeats_a_block(sequential, expected):
    assert names(holder(s=sequential)).get("s") == expected


def test_frozen_towers_are_found_by_name_and_only_when_fully_frozen():
    model = holder(
        vision_tower=holder(layers=nn.ModuleList([Block()])), layers=nn.ModuleList([Block()])
    )
    assert frozen_towers(model) == []
    model.vision_tower.requires_grad_(False)
    model.layers.requires_grad_(False)
    assert [name for name, _ in frozen_towers(model)] == ["vision_tower"]
    model.vision_tower.layers[0].linear.weight.requires_grad_(True)
    assert frozen_towers(model) == []


def stack() -> nn.Module:
    return holder(layers=nn.ModuleList([Block()]))


def test_groups_are_told_apart_by_the_names_on_the_paths_of_stacks():
    model = holder(
        vision_tower=stack(), audio_encoder=stack(), mm_projector=stack(), language_model=stack()
    )
    assert {g: [s.name for s in stacks] for g, stacks in layer_groups(model).items()} == {
        "vision": ["vision_tower.layers", "mm_projector.layers"],
        "audio": ["audio_encoder.layers"],
        "language": ["language_model.layers"],
    }
    del model.vision_tower
    assert [s.name for s in layer_groups(model)["audio"]] == [
        "audio_encoder.layers",
        "mm_projector.layers",
    ]
    del model.audio_encoder
    assert list(layer_groups(model)) == ["language"]


class Config:
    def to_dict(self):
        return vars(self)


class SpeechConfig(Config):
    """That its part hears is in its name alone."""


def test_a_part_with_a_configuration_of_its_own_and_no_vocabulary_is_a_tower():
    sound, pictures, text = SpeechConfig(), Config(), Config()
    text.vocab_size = 8
    model = holder(encoder=stack(), quantizer=stack(), decoder=stack(), other=stack())
    model.config = Config()
    model.config.a, model.config.b, model.config.c = sound, pictures, text
    model.encoder.config, model.quantizer.config = sound, pictures
    model.decoder.config, model.other.config = text, model.config
    assert {g: [s.name for s in stacks] for g, stacks in layer_groups(model).items()} == {
        "audio": ["encoder.layers"],
        "vision": ["quantizer.layers"],
        "language": ["decoder.layers", "other.layers"],
    }
    model.encoder.requires_grad_(False)
    assert [name for name, _ in frozen_towers(model)] == ["encoder"]


def test_single_layers_by_name_belong_to_the_layer_that_holds_them():
    """As adapters stand: units of their own would stall where some ranks skip their layer."""
    projector = holder(linear=nn.Linear(4, 4), adapters=nn.ModuleDict({"a": nn.Linear(4, 4)}))
    assert names(holder(projector=projector)) == {}
