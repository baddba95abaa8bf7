"""What each figure of the page means, what a bad value means, and what to do then.

Written for somebody who has read the README only. `docs` is a page of the documentation, and where
on it.
"""

from __future__ import annotations

MEANINGS: dict[str, dict[str, str]] = {
    "what": {
        "means": "How clusters come to one model; a preset is a name for such a choice. Schedule: "
        "when the parts of the model (fragments) are sent, each one every `interval` inner steps, "
        "which is H. Delay: how many steps later the mean of all clusters is applied, so that "
        "training goes on meanwhile. Compression: in what format numbers are sent. Outer "
        "optimizer: how the model is moved by that mean.",
        "bad": "Another method, or another H, than you meant.",
        "do": "The \"dsx\" block of the run's JSON says it, or flags do; `dsx plan` says what fits "
        "a line.",
        "docs": "docs/methods/index.md",
    },
    "loss": {
        "means": "How wrong each cluster's model is on what it trains on, lower is better. A "
        "shade is the range between the points; the average is of all clusters that train. "
        "Validation, where it is recorded, is on data that is not trained on.",
        "bad": "A gap is a loss that is no number. One cluster far above the others, or a loss "
        "that rises for good: training goes wrong there.",
        "do": "Compare that cluster's data and learning rate with the others'. `divergence` goes "
        "back to a checkpoint by itself.",
        "docs": "docs/troubleshooting.md#diverged",
    },
    "validation": {
        "means": "The loss on data that is not trained on: how good the model is. At the end of a "
        "run it is that of the average of all clusters, which is the model to keep.",
        "bad": "One that rises while the training loss falls: the model learns its data by heart.",
        "do": "More data, or fewer steps.",
        "docs": "docs/quickstart.md",
    },
    "utilization": {
        "means": "The share of the time in which dsx did not hold training up: 100 % is a run as "
        "fast as if clusters exchanged nothing.",
        "bad": "Much below 95 %: training waits for the line, or copies too often.",
        "do": "A larger H (`schedule.interval`), fewer bits, or a `delay`; `dsx plan` says which.",
        "docs": "docs/troubleshooting.md#waits",
    },
    "speed": {
        "means": "Tokens that each cluster trains on in a second.",
        "bad": "A cluster that has become slower, when nothing was changed: a slow disk, a GPU "
        "that is throttled, or somebody else's job.",
        "do": "Look at that host. All clusters wait for the slowest at each round.",
        "docs": "docs/trace.md",
    },
    "step_seconds": {
        "means": "How long an inner step takes in each cluster, everything included.",
        "bad": "Peaks at each round are waits for the line; a level that rises is a host that has "
        "become slower.",
        "do": "`dsx trace` shows what a step does with its time.",
        "docs": "docs/trace.md",
    },
    "line": {
        "means": "What a cluster's transfers carry while they are under way, in bytes or bits "
        "per second. The limit is what the run was given (`link.rate_mbit`). Measured is what a "
        "cluster sent in an all-reduce of `dsx net-test`, whose file `metrics.net_test` names.",
        "bad": "Less than half of what the line gave when it was measured. A transfer's time has "
        "its coding and its waits for the others in it, so a short one is below that.",
        "do": "`dsx net-test` measures the line; plan again with what it gives.",
        "docs": "docs/plan.md",
    },
    "transfer": {
        "means": "How long a fragment's transfer takes, and how much of that training waits.",
        "bad": "Waits that are not near 0 with a method that has a delay: the line is slower than "
        "the delay was chosen for.",
        "do": "More `delay.steps`, a larger H, or fewer bytes.",
        "docs": "docs/troubleshooting.md#waits",
    },
    "sent": {
        "means": "What one cluster has handed to the network for the others since the start. The "
        "ratio is to data parallel training, which sends all gradients in fp32 at every step.",
        "bad": "A ratio of a few only: rounds are short, or nothing is compressed.",
        "do": "A larger H, or a compression of fewer bits.",
        "docs": "docs/compression.md",
    },
    "links": {
        "means": "Each cluster's link to each other one: the round trip of a short message, the "
        "last one and the least of all; bytes that went out and came in since the "
        "process began, what `dsx watch --join` asks for included, and how many a second in the "
        "last minute, between transfers, too. Measured is what a cluster sent there in "
        "`dsx net-test` (`metrics.net_test`), while the other one sent as well. Of first ranks, "
        "over links: a cluster of several ranks has as many, which share the line.",
        "bad": "A round trip far above its least: the line's queues are full. Bytes that "
        "stand still: nothing is exchanged.",
        "do": "Set `link.rate_mbit` a little below what `dsx net-test` gives, or look who else "
        "uses the line.",
        "docs": "docs/network.md",
    },
    "round_trip": {
        "means": "How long a short message takes to another cluster and back, beside all else that "
        "is on the line: of a cluster's links the slowest one.",
        "bad": "Far above the least: the line's queues are full. A step upwards: another route.",
        "do": "Set `link.rate_mbit` a little below what `dsx net-test` gives, or look who else "
        "uses the line.",
        "docs": "docs/network.md",
    },
    "memory": {
        "means": "What each cluster's first rank holds. Outer state: what dsx keeps beside "
        "training, against what was planned at the start. Process: all that the rank has of its "
        "host's memory, training included. Device: what torch holds of the accelerator.",
        "bad": "Outer state above its plan, or a process that grows for hours: something is not "
        "let go. A device that is nearly full: a little more ends the run.",
        "do": "`dsx memory` says what each setting takes: fewer fragments under way, "
        "`state.device` host, or a compression without error feedback takes less.",
        "docs": "docs/plan.md#will-it-fit",
    },
    "members": {
        "means": "Each cluster: whether it trains, when it last said something, its weight in the "
        "mean (means are not weighted: 1/n of the n clusters that train, 0 for one that is left "
        "out), its H (inner steps between two launches), what it has sent, and rounds that were "
        "left out for its sake: refused, differed, uncommitted, idle.",
        "bad": "Silent: no record for five of its steps. Killed: its process is gone. Left "
        "out: the others go on without it. Heals: it comes back, and fetches the state. A weight "
        "of 0: what it trains on is lost. A time left that is not there: it comes no nearer to "
        "those that train. Rounds left out: \"Same model everywhere\" says what "
        "each reason means.",
        "do": "Start a cluster that is gone with the same command: it joins again.",
        "docs": "docs/elastic.md#bringing-a-cluster-back",
    },
    "lanes": {
        "means": "Each row is a part of the model (a fragment) that is exchanged on its own. It is "
        "trained on all the time. A bar begins where its changes are sent, is on the line, lies "
        "ready, and ends where the mean of all clusters is applied. One that reaches the right "
        "edge is under way now.",
        "bad": "A dark end of a bar: training stood still and waited for it. A thin line that "
        "stops before the right edge: no step has ended since.",
        "do": "More `delay.steps` makes bars longer and waits shorter; fewer bytes do, too.",
        "docs": "docs/trace.md",
    },
    "parity": {
        "means": "Clusters check in every round that they hold the same model to the bit. A round "
        "in which they do not is left out, and mended.",
        "bad": "Anything but 0. Differed: other bits; refused: values that are not finite or "
        "far too large; uncommitted: another mean; idle: a cluster took no step.",
        "do": "The log names the cluster: test its memory and network cards.",
        "docs": "docs/troubleshooting.md#parityerror",
    },
    "guard": {
        "means": "The guard looks at every mean and warns where outer training goes wrong.",
        "bad": "An alarm, or a step down that it has taken.",
        "do": "The event says which figure and what to change: mostly a smaller outer rate.",
        "docs": "docs/methods/guard.md#alarms",
    },
    "agreement": {
        "means": "Autocorrelation: does a round go on in the direction of the one before? Cosine: "
        "do clusters pull in the same direction? Norm ratio: does one pull harder than others?",
        "bad": "Autocorrelation below -0.1, cosine below -0.02, a ratio above 1.35 or below 0.74.",
        "do": "Lower the outer rate or momentum; compare the clusters' data and inner rates.",
        "docs": "docs/methods/guard.md#figures",
    },
    "gain": {
        "means": "How far an outer step goes in the long run, in units of one mean.",
        "bad": "Above 5; above 2.2 with `delay.type` shift, above 3.2 where means come a round "
        "late.",
        "do": "Lower `outer_optimizer.lr` or `momentum`.",
        "docs": "docs/methods/guard.md#alarms",
    },
    "norms": {
        "means": "The size of what clusters send (pseudo-gradients: how far they have come since "
        "the last round), and of the mean that comes back.",
        "bad": "A mean much smaller than what is sent: clusters pull apart. A size that grows for "
        "good: training goes wrong.",
        "do": "Look at the loss and at the guard's figures.",
        "docs": "docs/methods/guard.md#figures",
    },
    "age": {
        "means": "H: inner steps from one launch of a fragment to the next. Age: inner steps from "
        "a launch until its mean is applied.",
        "bad": "An age that rises: the line has become slower.",
        "do": "`dsx net-test`, and a new plan with what it gives.",
        "docs": "docs/plan.md",
    },
    "compression": {
        "means": "The rank of what is sent, the share of its energy that this captures, and how "
        "large the correction of delayed means is.",
        "bad": "Captured energy that falls: what is left out is lost, or comes later.",
        "do": "A higher rank, or more bits.",
        "docs": "docs/compression.md",
    },
    "own_progress": {
        "means": "The size of what a cluster has learned since it sent last, and keeps until it "
        "sends again.",
        "bad": "A size that grows from round to round: clusters drift apart.",
        "do": "A smaller H, or a shorter delay.",
        "docs": "docs/methods/shift.md",
    },
    "checkpoints": {
        "means": "What was saved complete, and which of it all clusters have: from there the run "
        "can go on.",
        "bad": "None for long, or none that all clusters have.",
        "do": "Save more often; the log says why a checkpoint was not saved.",
        "docs": "docs/checkpoints.md",
    },
    "events": {
        "means": "Starts, ends, checkpoints, and every warning of every cluster, the last first.",
        "bad": "A warning says what is wrong and what to do.",
        "do": "Look its words up under \"Every message\".",
        "docs": "docs/troubleshooting.md",
    },
    "eta": {
        "means": "When the run has taken its steps, at the rate of the last 50.",
        "bad": "It is not there where nobody has told how many steps are planned.",
        "do": "`log_step(total_steps=...)` tells; trainers do.",
        "docs": "docs/deepspeed.md",
    },
}  # fmt: skip
