"""Metrics of several replicas as one text of Prometheus: each series once, with the label replica."""

import re
from collections.abc import Mapping, Sequence

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?( .+)")


def merge(texts: Mapping[str, str]) -> str:
    """Merge the texts of replicas, by tag. Lines of one metric stand together; its HELP and TYPE stand once."""
    heads: dict[str, list[str]] = {}  # HELP and TYPE
    samples: dict[str, list[str]] = {}
    for tag, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, tag))
    return "".join(f"{line}\n" for family, head in heads.items() for line in (*head, *samples.get(family, ())))


def fleet_metrics(states: Sequence[str], update_count: int, deaths: int) -> str:
    """The metrics of the fleet itself. `states`: of the replicas."""
    lines = ["# HELP routed_experts_fleet_replicas Replicas by state", "# TYPE routed_experts_fleet_replicas gauge"]
    for state in sorted({"serving", *states}):
        lines.append(f'routed_experts_fleet_replicas{{state="{state}"}} {states.count(state)}')
    for name, text, kind, value in (
        (
            "fleet_weight_version",
            "Updates of the weights that all replicas serve, or of their label",
            "gauge",
            update_count,
        ),
        ("replica_deaths_total", "Replicas that have died", "counter", deaths),
    ):
        full = f"routed_experts_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"


def _labelled(line: str, tag: str) -> str:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return line
    name, labels, rest = match.groups()
    more = f",{labels[1:-1]}" if labels and labels != "{}" else ""
    return f'{name}{{replica="{tag}"{more}}}{rest}'
