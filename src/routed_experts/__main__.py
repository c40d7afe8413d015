"""`python -m routed_experts` is `routed-experts`."""

import sys


def run() -> int:
    """Run one command and return its exit code; 130 after Ctrl-C, also while modules are imported, and where Python
    cannot raise it."""
    try:
        from routed_experts.core.interrupts import hold_interrupts, resend_lost_interrupts

        with resend_lost_interrupts():
            with hold_interrupts():
                from routed_experts.cli import main

            return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
