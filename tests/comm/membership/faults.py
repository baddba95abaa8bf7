"""What goes wrong by chance in a simulated world, half of it at the coordinator."""

from __future__ import annotations

from tests.comm.membership.world import World

KINDS = (
    ["slow"] * 3 + ["fast"] * 2 + ["reset"] * 2 + ["kill"] * 2 + ["restart"] * 3
    + ["pause", "wake", "cut", "heal", "heal", "part", "wrong", "leave", "say"]
)  # fmt: skip


def run_seed(seed: int, num_events: int = 2500) -> tuple[World, bool]:
    """Return a world after its faults, and whether it went on; raises Violation."""
    world = World(seed)
    rate = world.rng.choice([0.01, 0.03, 0.06])
    for _ in range(num_events):
        if world.rng.random() < rate:
            fail(world)
        world.step()
    return world, world.finish()


def fail(world: World) -> None:
    """One fault of some kind, if it is possible now."""
    rng, alive, leaders = world.rng, list(world.nodes), world.leaders
    kind = rng.choice(KINDS)
    one = rng.choice(leaders if leaders and rng.random() < 0.5 else alive)
    if _lines(world, kind, one) or _processes(world, kind, one):
        world.count[kind] += 1


def _lines(world: World, kind: str, one: int) -> bool:
    rng = world.rng
    if kind == "slow":
        ways = [(x, y) for x in range(world.size) for y in range(world.size) if x != y]
        world.slow |= {w for w in ways if rng.random() < (0.8 if w[0] == one else 0.15)}
    elif kind == "fast":
        world.slow.clear()
    elif kind == "reset" and len(world.nodes) > 1:
        other = rng.choice([m for m in world.nodes if m != one])
        if frozenset((one, other)) not in world.cuts:
            world.disconnect(one, other, is_told=rng.random() < 0.5)
            world.connect(one, other)
    elif kind == "cut":
        pairs = [frozenset((one, m)) for m in range(world.size) if m != one]
        world.cut({rng.choice(pairs)} - world.cuts)
    elif kind == "part":
        world.part({m for m in range(world.size) if rng.random() < 0.5})
    elif kind == "heal":
        world.heal()
    else:
        return False
    return True


def _processes(world: World, kind: str, one: int) -> bool:
    rng = world.rng
    if kind == "kill" and world.may_lose(one):
        world.kill(one)
    elif kind == "restart" and len(world.nodes) < world.size:
        world.begin(rng.choice([m for m in range(world.size) if m not in world.nodes]))
    elif kind == "pause" and len(world.frozen) < (world.size - 1) // 2:
        world.frozen.add(one)
    elif kind == "wake":
        world.frozen.clear()
    elif kind == "wrong":
        world.trainings[one].num_wrong = rng.choice([1, 1, 3])
    elif kind == "leave" and rng.random() < 0.3 and world.may_lose(one):
        if world.replica(one).is_member:
            world.leaving.add(one)
            world.nodes[one].log.leave()
    elif kind == "say":
        world.nodes[one].log.say(rng.choice("xyz"), str(one), lasts=rng.choice([0, 20]))
    else:
        return False
    return True
