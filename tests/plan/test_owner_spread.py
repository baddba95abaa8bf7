"""How evenly the ranks of DeepSpeed's 107 B are loaded: by bytes in every cluster, by elements.

Over the layouts of `dsx memory`, which are a dry run's, without building anything.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsx.config.schema import DsxConfig, load_config
from dsx.core.types import Fragment, Stage
from dsx.method.fragments import assign_stage, lay_out
from dsx.outer.matrix_owners import EVEN, wanted_whole
from dsx.outer.whole_matrices import wires_of
from dsx.plan.memory.pieces import held_by_rank, pieces_by_rank
from dsx.plan.model_files import ModelFiles, read_model
from dsx.plan.stage_weights import stage_shapes
from dsx.plan.traffic import Load, Share, Traffic
from tests.docs.pages import ROOT

CONFIGS = ROOT / "configs"


def read(name: str, num_clusters: int) -> tuple[ModelFiles, DsxConfig]:
    document = json.loads((CONFIGS / name).read_text())
    document["dsx"]["clusters"] = {"num_clusters": num_clusters}
    files = read_model(CONFIGS / name, CONFIGS / "qwen_107b.flags", 80)
    return files, load_config(document)


def wires(files: ModelFiles, config: DsxConfig, index: int) -> list[list[Fragment]]:
    model, cluster, method = files.model, files.cluster, config.method
    stage = Stage(index, cluster.pipeline)
    shapes = stage_shapes(model, cluster, stage)
    assignment = assign_stage(method.fragments, shapes, stage)
    whole = {shape.name: shape.shape for shape in shapes}
    held = held_by_rank(model, cluster, stage)
    pieces = pieces_by_rank(model, cluster, stage, assignment, held)
    layouts = [lay_out(assignment, of_rank, whole, index) for of_rank in pieces]
    return wires_of(layouts, wanted_whole(method))


def most_by_mean(config: DsxConfig, ranks: list[list[Fragment]]) -> tuple[float, float]:
    """Return it of the bytes of a rank in a cluster, and of the elements of a rank."""
    clusters = config.clusters.num_clusters
    sent = [
        Traffic(
            config.method,
            [Load(f.stage, f.id, len(f.layout), (Share(f, (shard,)),)) for f in own if f.numel],
            clusters,
        ).bytes_sent.sum(axis=0)
        for shard, own in enumerate(ranks)
    ]
    elements = np.array([sum(f.numel for f in own) for own in ranks])
    return float(np.max(sent) / np.mean(sent)), float(elements.max() / elements.mean())


@pytest.mark.parametrize("num_clusters", [16, 32, 128])
@pytest.mark.parametrize(
    ("file", "stage"),
    [
        pytest.param("qwen_107b_zero3.json", 0, marks=pytest.mark.ci),
        ("qwen_107b_pipeline.json", 0),
        ("qwen_107b_pipeline.json", 10),
        ("qwen_107b_pipeline.json", 19),
    ],
)
def test_owners_of_the_107_b_have_a_tenth_above_the_mean_at_most(
    file: str, stage: int, num_clusters: int
) -> None:
    files, config = read(file, num_clusters)
    of_bytes, of_elements = most_by_mean(config, wires(files, config, stage))
    assert of_bytes <= EVEN and of_elements <= EVEN


@pytest.mark.parametrize(
    ("file", "stage", "most"),
    [
        pytest.param("qwen_107b_zero3.json", 0, 1.08, marks=pytest.mark.ci),
        ("qwen_107b_pipeline.json", 0, 1.25),  # P of the embedding is with one of two clusters
        ("qwen_107b_pipeline.json", 10, 1.08),
        ("qwen_107b_pipeline.json", 19, 1.24),
    ],
)
def test_of_two_clusters_one_has_the_longer_factor(file: str, stage: int, most: float) -> None:
    """Between so few none is cut: what a cut P adds is more than what it evens out."""
    files, config = read(file, 2)
    of_bytes, of_elements = most_by_mean(config, wires(files, config, stage))
    assert of_bytes <= most and of_elements <= EVEN
