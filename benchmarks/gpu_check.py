"""Every GPU kernel against the plain code that it stands for, on the card: ragged sizes, empty experts, one hot expert,
padding, NaN in what a kernel must not read.

    python benchmarks/gpu_check.py [--only moe router] [--every 3] [--name gpu_check_h200]

The cases: tests/support/gpu_cases.py. Ends with 1 if one fails. Distances are in the 2-norm, relative, against bfloat16 array
code."""

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from common import print_table, write_result

from support.gpu_cases import large_cases, small_cases


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="kernels")
    parser.add_argument("--every", type=int, default=1, help="run one case in so many")
    parser.add_argument("--name", default="gpu_check_h200")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    cases = (*(case for case in small_cases() if case.kernel == "router"), *large_cases())
    for case in [case for case in cases if not args.only or case.kernel in args.only][:: args.every]:
        start = time.perf_counter()
        outcome = case.run(False)
        said = {
            "distance": outcome.distance,
            "bound": outcome.bound,
            "wrong ids": outcome.wrong_ids,
            "good": outcome.is_good,
        }
        rows.append({"kernel": case.kernel, "case": case.name, **said, "s": round(time.perf_counter() - start, 2)})
    bad = [row for row in rows if not row["good"]]
    print_table(bad or rows)
    print(f"{len(rows) - len(bad)} of {len(rows)} cases are good")
    print(write_result(args.name, rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
