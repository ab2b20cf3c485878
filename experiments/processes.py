"""Child processes of a sweep: each on cores of its own, ended with its parent, its peak memory known. Linux only."""

import ctypes
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

GIB = 2**30
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # XLA itself counts the cores it may use


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended. code: as subprocess has it, -n for signal n. seconds: of wall time.

    peak_gib: memory that it held at most, as of the last look at it. (The system's own figure at the end is of no use:
    it begins with what the parent held.)
    """

    code: int
    seconds: float
    peak_gib: float


class Child:
    """A command on `cores`, in a session of its own, its stdout and stderr in files.

    The kernel kills it when the thread that started it ends, also by kill -9: nothing is ever left running alone.
    """

    def __init__(self, argv: Sequence[str], cores: Sequence[int], *, out: pathlib.Path, log: pathlib.Path):
        # This file run as a program, not preexec_fn: that forks, and a process with threads (jax) must not fork.
        leash = [sys.executable, "-IS", __file__, str(os.getpid()), ",".join(map(str, cores)), *argv]
        environ = os.environ | dict.fromkeys(THREADS, str(len(cores)))
        with out.open("wb") as stdout, log.open("ab") as stderr:
            self._process = subprocess.Popen(leash, stdout=stdout, stderr=stderr, env=environ, start_new_session=True)
        self.pid, self._began, self._peak = self._process.pid, time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self._began

    def poll(self) -> Ended | None:
        """How it ended; None while it runs. Asked again after the end: an error of the system."""
        self._peak = max(self._peak, self._held("VmHWM"))
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return Ended(self._process.returncode, self.seconds, self._peak)

    def resident_gib(self) -> float:
        """Memory that it holds now."""
        return self._held("VmRSS")

    def _held(self, name: str) -> float:
        return _field(pathlib.Path(f"/proc/{self.pid}/status"), name)

    def ask_to_stop(self) -> None:
        """Asks it to save and end."""
        os.killpg(self.pid, signal.SIGTERM)

    def stop(self, patience: float) -> None:
        """Waits until it has ended; kills it after `patience` seconds."""
        until = time.monotonic() + patience
        while self.poll() is None:
            if time.monotonic() > until:
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.05)


def available_gib() -> float:
    """Memory that the machine can still give."""
    return _field(pathlib.Path("/proc/meminfo"), "MemAvailable")


def _field(file: pathlib.Path, name: str) -> float:
    """A field of a file of /proc that counts kB, in GiB; 0 when there is none (a process that has just ended)."""
    try:
        text = file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 / GIB if found else 0.0


def _become(parent: int, cores: Sequence[int], argv: Sequence[str]) -> None:
    """Becomes a command that is bound to its parent's life and to cores."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)
    os.sched_setaffinity(0, cores)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _become(int(sys.argv[1]), [int(core) for core in sys.argv[2].split(",")], sys.argv[3:])
