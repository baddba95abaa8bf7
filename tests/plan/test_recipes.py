"""The planner's own table of presets against the presets, and its memory against the library's."""

from __future__ import annotations

import pytest

from dsx.config.schema import preset
from dsx.core.types import ParameterShape
from dsx.method.choices import PRESETS
from dsx.method.control.adaptive_rank import AdaptiveRank
from dsx.method.fragments import ByLayer
from dsx.outer import memory
from dsx.plan.model import from_sizes
from dsx.plan.offer import OWN_LEAST_INTERVAL
from dsx.plan.outer_memory import outer_bytes
from dsx.plan.recipes import RECIPES, codecs_for
from dsx.plan.settings import settings_of
from dsx.plan.traffic import one_rank

MODEL = from_sizes(8 * 12 * 64**2, 8, 64, ranks=1)
COUNT = 4


def test_every_preset_has_a_row() -> None:
    assert sorted(RECIPES) == sorted(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_says_what_its_preset_is_for_the_line(name: str) -> None:
    recipe = RECIPES[name]
    for codec in codecs_for(recipe, hidden=64):
        if name == "dilocox":
            overrides = {"control": {"rank": codec.coding.rank, "max_rank": codec.coding.rank}}
        else:
            overrides = {"compression": codec.block} if codec.block else {}
        method = preset(name, **overrides)
        settings = settings_of(method)
        assert recipe.settings(settings.interval, settings.overlap_steps, codec.coding) == settings
        assert recipe.is_overlapped == (settings.overlap_steps > 0)


def test_an_offer_knows_dilocox_s_least_interval() -> None:
    control = preset("dilocox").control
    assert isinstance(control, AdaptiveRank) and control.min_interval == OWN_LEAST_INTERVAL


@pytest.mark.parametrize("num_clusters", [2, 4])
@pytest.mark.parametrize("name", PRESETS)
def test_a_row_says_what_its_preset_keeps(name: str, num_clusters: int) -> None:
    recipe = RECIPES[name]
    count = COUNT if recipe.fragment_counts else 1
    for codec in codecs_for(recipe, hidden=64):
        overrides = {"compression": codec.block} if codec.block else {}
        if recipe.fragment_counts:
            overrides["fragments"] = {"num_fragments": count, "pattern": recipe.pattern}
        if recipe.is_low_rank:
            overrides["control"] = {"rank": codec.coding.rank, "max_rank": codec.coding.rank}
        method = preset(name, **overrides)
        (fragments,) = one_rank(method.fragments, MODEL.stages[0])
        tensors = [len(f.layout) for f in fragments]
        real = memory.predict(method, fragments, tensors, fragments, num_clusters)
        ours = outer_bytes(
            recipe,
            codec.coding,
            MODEL.loads(recipe.fragmenter(count), codec.coding),
            num_clusters,
        )
        assert (ours.anchor, ours.momentum) == (real.anchor, real.outer_optimizer)
        assert (ours.delay, ours.work_space) == (real.delay, real.work_space)
        assert ours.residual == pytest.approx(real.codec, rel=0.01)
        assert ours.in_flight == pytest.approx(real.transfers, rel=0.01)
        assert ours.total == pytest.approx(real.total, rel=0.01)


def test_ranks_share_what_one_would_hold() -> None:
    coding = codecs_for(RECIPES["dilocox"], hidden=64)[0].coding
    fragmenter = ByLayer(4, "sequential")
    one = MODEL.loads(fragmenter, coding)
    many = from_sizes(8 * 12 * 64**2, 8, 64, ranks=3).loads(fragmenter, coding)
    for alone, shared in zip(one, many, strict=True):
        assert len(shared.parts) == 3
        assert alone.numel <= shared.numel < alone.numel + 3
        matrices = [m for parts, _ in shared.parts for m in parts.matrices]
        assert sorted(matrices) == sorted(alone.parts[0][0].matrices)


def test_a_width_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden=4096: .* try hidden="):
        from_sizes(1e9, 100, 4096, 1)


def test_a_model_has_the_parameters_it_was_given() -> None:
    assert from_sizes(7e9, 32, 4096, 8).numel == pytest.approx(7e9, rel=1e-3)
    assert from_sizes(7e9, 32, None, 8).numel == pytest.approx(7e9, rel=1e-6)
    shapes = [ParameterShape("layers.0.weight", (2, 3))]
    assert one_rank(ByLayer(), shapes)[0][0].numel == 6
