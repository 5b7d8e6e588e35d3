"""Running a child process from a notebook, its output shown line by line as it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_with_live_output(
    command: str | Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None
) -> int:
    """Run a command (a string goes through the shell), print its output as it appears, return its exit code.

    Interrupting the cell passes the interrupt on once, so that a node can end its round, and waits for it.
    """
    child = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,
    )
    assert child.stdout is not None
    interrupted = False
    while True:
        try:
            for line in child.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
            return child.wait()
        except KeyboardInterrupt:
            # The child leads a group of its own: a shell in between would keep the signal to itself.
            if interrupted:
                os.killpg(child.pid, signal.SIGKILL)
                raise
            interrupted = True
            os.killpg(child.pid, signal.SIGTERM)
