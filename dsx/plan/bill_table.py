"""The columns that prices, a length and an MTBF add to a plan's table, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.plan.budget import HELD_UP_SECONDS, RESTART_SECONDS, Bill, Budget
from dsx.plan.candidates import Question


def headings(budget: Budget) -> list[str]:
    """Return the names of the columns."""
    found = ["goodput\n%"] if budget.has_goodput else []
    found += [] if budget.steps is None else ["days"]
    if budget.has_prices:
        found.append("cost per\nday" if budget.steps is None else "cost of\nthe run")
    return found


def cells(bill: Bill, budget: Budget) -> list[str]:
    """Return what stands in them."""
    goodput = "-" if bill.goodput is None else f"{100 * bill.goodput:.2f}"
    found = [goodput] if budget.has_goodput else []
    found += [] if bill.days is None else [f"{bill.days:.4g}"]
    return found + ([] if bill.price is None else [money(bill.price)])


def explain_bills(budget: Budget, question: Question, bills: Sequence[Bill]) -> list[str]:
    """Return what the columns mean, line by line."""
    lines = [] if budget.mtbf_hours is None else _of_losses(budget, question, bills)
    if budget.save_every is not None and budget.save_seconds is not None:
        lines.append(
            f"saves: every {budget.save_every:g} steps training waits {budget.save_seconds:g} s, "
            "which is in goodput, days and costs"
        )
    prices: list[str] = []
    if budget.gpu_hour_price is not None:
        count = question.num_clusters * question.model.ranks
        prices.append(f"{count} accelerators at {budget.gpu_hour_price:g} an hour")
    if budget.egress_price is not None:
        prices.append(f"{budget.egress_price:g} a GB that leaves a cluster")
    if prices:
        lines.append(f"cost: of all clusters, {' and '.join(prices)}")
    return lines


def money(amount: float) -> str:
    """Return an amount, in the money of the prices."""
    return f"{amount:,.2f}" if amount < 1000 else f"{amount:,.0f}"


def _of_losses(budget: Budget, question: Question, bills: Sequence[Bill]) -> list[str]:
    lines = [
        "goodput: the share that computes what is kept, where each cluster is lost once in "
        f"{budget.mtbf_hours:g} h on average,"
    ]
    heals = sorted({bill.heal_seconds for bill in bills if bill.heal_seconds is not None})
    if heals:
        after = " to ".join(f"{seconds:.4g}" for seconds in dict.fromkeys((heals[0], heals[-1])))
        own = "" if budget.heal_seconds is not None else (
            " (twice what the line takes for its copy; --heal-seconds as measured)"
        )  # fmt: skip
        others = RESTART_SECONDS if question.num_clusters == 2 else HELD_UP_SECONDS
        whom = "the other" if question.num_clusters == 2 else "the others"
        lines.append(f"  trains again after {after} s{own}, and holds {whom} up for {others:g} s")
    if any(bill.goodput is None for bill in bills):
        lines.append(
            "  -: nobody comes back into such a run, which begins again from a checkpoint; "
            "--heal-seconds says how long that takes"
        )
    return lines
