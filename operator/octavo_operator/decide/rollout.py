"""The next number of replicas of each revision. Integers in, one step out; no clock, no pods.

The idea. `shares` says where the rollout is heading: {new: N} while rolling, {stable: 9, canary: 1}
during a canary; a revision without a share is to vanish. Each step moves every group's target
towards its share as far as two promises allow:

    sum of targets        <= replicas + max_surge
    sum of min(routable, target) >= replicas - max_unavailable      (or no lower than it is)

A target counts as capacity only as far as its replicas are *routable*: a replica that is ready but
that no router knows serves no requests. `min(routable, target)` counts replicas that were already
removed from the target as gone. Steps are absolute numbers computed from what is, never from what
was planned: three edits in a row, a revert, or a restart between any two writes are just another
`groups`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_operator.objects.quantities import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class RevisionReplica:
    """One engine: a pod, or a process of local mode."""

    id: str
    revision: str
    ready: bool = False
    routable: bool = False  # ready, and every router replica sends it traffic
    in_flight: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class RevisionGroup:
    """The replicas of one revision: their target number and their state."""

    revision: str
    target: int
    routable: int = 0  # of those that stay
    existing: int = 0  # with those that are leaving

    @property
    def serving(self) -> int:
        return min(self.routable, self.target)

    @property
    def idle(self) -> int:
        """Requested, but not serving."""
        return self.target - self.serving


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """What was promised while replicas are exchanged."""

    replicas: int
    max_surge: int = 1
    max_unavailable: int = 0

    @property
    def most(self) -> int:
        return self.replicas + self.max_surge

    @property
    def least_serving(self) -> int:
        return max(0, self.replicas - self.max_unavailable)


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Targets to write, in this order; revisions whose group can be deleted; are we there?"""

    targets: dict[str, int]
    vanished: tuple[str, ...]
    is_done: bool
    waiting_for: str = ""


def limits_of(replicas: int, max_surge: int | str, max_unavailable: int | str) -> RolloutLimits:
    """Percentages resolved as Kubernetes does. Both zero could never move: one extra is allowed."""
    surge = parse_count(max_surge, replicas, round_up=True)
    unavailable = parse_count(max_unavailable, replicas, round_up=False)
    if surge == 0 and unavailable == 0:
        surge = 1
    return RolloutLimits(replicas=replicas, max_surge=surge, max_unavailable=unavailable)


def group_replicas(
    targets: Mapping[str, int], replicas: Iterable[RevisionReplica]
) -> list[RevisionGroup]:
    """One group per revision that has a target or a replica."""
    routable: dict[str, int] = {}
    existing: dict[str, int] = {}
    for replica in replicas:
        existing[replica.revision] = existing.get(replica.revision, 0) + 1
        if replica.routable and not replica.is_leaving:
            routable[replica.revision] = routable.get(replica.revision, 0) + 1
    return [
        RevisionGroup(name, targets.get(name, 0), routable.get(name, 0), existing.get(name, 0))
        for name in sorted(targets.keys() | existing.keys())
    ]


def next_step(
    limits: RolloutLimits, shares: Mapping[str, int], groups: Sequence[RevisionGroup]
) -> RolloutStep:
    """The targets that may be set now. Increases come first, so every prefix is safe."""
    by_name = {group.revision: group for group in groups}
    targets = {group.revision: group.target for group in groups}
    _grow(limits, shares, targets)
    grown = {name: target for name, target in targets.items() if target != _target(by_name, name)}
    _shrink(limits, shares, by_name, targets)
    changed = grown | {n: target for n, target in targets.items() if target != _target(by_name, n)}
    vanished = tuple(
        group.revision
        for group in groups
        if group.revision not in shares and group.target == 0 and group.existing == 0
    )
    waiting_for = _waiting_for(shares, by_name, targets)
    is_done = (
        not changed
        and not waiting_for
        and len(vanished) == sum(group.revision not in shares for group in groups)
    )
    return RolloutStep(changed, vanished, is_done, waiting_for)


def recreate_step(
    limits: RolloutLimits, revision: str, groups: Sequence[RevisionGroup]
) -> RolloutStep:
    """Strategy Recreate: all old replicas leave before the first of the new revision starts, for
    models of which only one copy fits."""
    others = [group for group in groups if group.revision != revision]
    present = [group.revision for group in others if group.target or group.existing]
    if not present:
        return next_step(limits, {revision: limits.replicas}, groups)
    return RolloutStep(
        {group.revision: 0 for group in others if group.target},
        tuple(group.revision for group in others if group.revision not in present),
        is_done=False,
        waiting_for=f"replicas of revision {', '.join(present)} to leave",
    )


def victims(replicas: Sequence[RevisionReplica], count: int) -> list[RevisionReplica]:
    """The `count` replicas to remove: first those that do not serve, then the least busy."""
    staying = [replica for replica in replicas if not replica.is_leaving]
    order = sorted(staying, key=lambda r: (r.routable, r.ready, r.in_flight, r.id))
    return order[: max(0, count)]


def _grow(limits: RolloutLimits, shares: Mapping[str, int], targets: dict[str, int]) -> None:
    room = limits.most - sum(targets.values())
    for name, share in shares.items():
        missing = share - targets.get(name, 0)
        if missing > 0:
            step = min(missing, max(0, room))
            targets[name] = targets.get(name, 0) + step
            room -= step


def _shrink(
    limits: RolloutLimits,
    shares: Mapping[str, int],
    groups: Mapping[str, RevisionGroup],
    targets: dict[str, int],
) -> None:
    """First what does not serve, then what does; the smallest group first, so that a rollout that
    was overtaken leaves before the one that carries the load."""
    excess = sorted(
        (group for name, group in groups.items() if group.target > shares.get(name, 0)),
        key=lambda group: (group.target, group.revision),
    )
    # Replicas that are still starting are capacity to come: those of growing groups are not
    # counted, so that a revision which never becomes ready cannot push out the one that waits.
    starting = sum(
        targets[name] - min(groups[name].routable, targets[name]) if name in groups else target
        for name, target in targets.items()
        if targets[name] <= shares.get(name, 0)
    )
    # There are more than the target: the user lowered it, so there is nothing to wait for.
    spare = sum(targets.values()) - limits.least_serving - starting
    for group in excess:
        step = min(group.idle, group.target - shares.get(group.revision, 0), max(0, spare))
        targets[group.revision] -= step
        spare -= step
    serving = sum(group.serving for group in groups.values())
    spare = serving - limits.least_serving
    for group in excess:
        now = targets[group.revision]
        step = min(now - shares.get(group.revision, 0), min(group.serving, now), max(0, spare))
        targets[group.revision] -= step
        spare -= step


def _target(groups: Mapping[str, RevisionGroup], name: str) -> int:
    return groups[name].target if name in groups else 0


def _waiting_for(
    shares: Mapping[str, int], groups: Mapping[str, RevisionGroup], targets: Mapping[str, int]
) -> str:
    for name, share in shares.items():
        serving = groups[name].serving if name in groups else 0
        if serving < share:
            return f"{share - serving} of {share} replicas of revision {name} to become routable"
    leaving = [name for name, target in targets.items() if name not in shares and target]
    return f"replicas of revision {', '.join(leaving)} to leave" if leaving else ""
