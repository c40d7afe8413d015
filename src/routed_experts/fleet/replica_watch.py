"""What `serve --num-replicas` says about its replicas: one line when one is lost, and one when another one serves."""

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(slots=True)
class ReplicaWatch:
    """Compares the tags of the replicas that serve, in `num_replicas`, with those before. `lost`: a tag, and the time
    when it was missed, of each replica that has no successor yet, the oldest first."""

    num_replicas: int
    serving: frozenset[str] | None = None
    lost: list[tuple[str, float]] = dataclasses.field(default_factory=list[tuple[str, float]])

    def changes(self, tags: Collection[str], now_s: float) -> list[str]:
        """One line for each replica that is missing or new since the last call; none at the first. `now_s`: of any
        clock that only rises, in seconds."""
        before, self.serving = self.serving, frozenset(tags)
        if before is None:
            return []
        state = f"{len(self.serving)} of {self.num_replicas} replicas serve"
        lines: list[str] = []
        for tag in sorted(before - self.serving):
            self.lost.append((tag, now_s))
            lines.append(f"replica {tag} is lost, and Ray starts another one; {state}")
        for tag in sorted(self.serving - before):
            since = ""
            if self.lost:
                missed, since_s = self.lost.pop(0)
                since = f", {now_s - since_s:.1f} s after {missed} was lost"
            lines.append(f"replica {tag} serves{since}; {state}")
        return lines
