"""ProcessLog: what another process has written, read while it writes."""

import os
import tempfile


class ProcessLog:
    """A temporary file for a process's standard error. The reader shares the file's offset with the writer, whose
    descriptor is a copy, so that no read may move it: a line that is written then would overwrite the first ones."""

    def __init__(self):
        self._file = tempfile.TemporaryFile("ab+")  # noqa: SIM115  # `close` closes it

    def fileno(self):
        """The descriptor to give to the process."""
        return self._file.fileno()

    def text(self):
        """All that has been written."""
        return os.pread(self.fileno(), os.fstat(self.fileno()).st_size, 0).decode(errors="replace")

    def close(self):
        self._file.close()
