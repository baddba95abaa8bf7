"""Which of the candidates to take: those that reach the target, the least harmful first.

Harm to convergence is counted in doublings of H, a rough scale that puts on one line what papers
report and the scripts of this repository measure on small models; it is not a prediction of loss:

- H itself: log2(H);
- being late: a whole round is as old as H twice as long, 1 (0.8 for eager, which goes on from its
  own share); tau steps of H are tau / H;
- the outer rule: 0.1 for heavy ball in place of Nesterov and for fragments that step apart, 0.3 for
  plain averaging (of these and of being late, the worst counts);
- the codec: bf16 0.02, int8 0.1, int4 with error feedback 0.3, FP4 without it 0.4, 2 bits
  both ways 0.5, low rank 0.5 and a quarter more for every halving of the rank from the model's
  width, 0.5 for one from outside; of picked elements as an H of the rounds until all have been
  sent, 7 for 0.1 * 0.08.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question
from dsx.plan.variants import staleness_of


def harm(candidate: Candidate) -> float:
    """Return the harm to convergence, as above; less is better."""
    interval, method = candidate.interval, candidate.method
    waits = candidate.overlap_steps / interval
    return math.log2(interval) + staleness_of(method) + waits + candidate.codec.loss


def ranked(candidates: Iterable[Candidate], question: Question) -> list[Candidate]:
    """Return the candidates, best first.

    First those that fit and reach the target, by harm; then those that fit but do not reach it, by
    utilization; then those that do not fit. Ties go to fewer bytes per day, then to less harm.
    """

    def key(candidate: Candidate) -> tuple[bool, bool, float, float, float]:
        reached = candidate.prediction.utilization
        is_short = reached < question.target
        merit = -reached if is_short else harm(candidate)
        ties = candidate.bytes_per_day, harm(candidate)
        return not candidate.is_fitting, is_short, merit, *ties

    return sorted(candidates, key=key)


def best_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of every preset, in order."""
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        found.setdefault(candidate.preset, candidate)
    return list(found.values())
