"""`python -m routed_experts` is `routed-experts`."""

import sys

from routed_experts.cli import main

if __name__ == "__main__":
    sys.exit(main())
