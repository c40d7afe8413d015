"""ProcessLog loses no line of a process that writes while it is read."""

import subprocess
import sys

from support.process_log import ProcessLog

LINES = 20_000


def test_lines_that_are_written_during_reads_are_all_there():
    log = ProcessLog()
    program = f"import os\nfor number in range({LINES}):\n    os.write(2, b'line %d\\n' % number)"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=log)
    num_reads = 0
    while process.poll() is None:
        log.text()
        num_reads += 1
    assert process.returncode == 0 and num_reads > 1
    assert log.text().splitlines() == [f"line {number}" for number in range(LINES)]
    log.close()
