"""The flag that a signal sets, so that a run is stopped between updates and never inside one."""

import os
import signal
import threading
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Turns SIGTERM and SIGINT into a flag that the trainer polls between updates, then saves and exits 0.

        with Stop() as stop:
            while not done and not stop.requested: ...

    A second SIGINT ends the process at once with code 130, also inside a long compile: a thread counts them. A repeated
    SIGTERM does not (launchers often send two). Main thread only. On leaving, the earlier handlers are back.

    requested  True once a signal came.
    name       the signal that came first, such as 'SIGTERM'; None before.
    """

    def __init__(self):
        self.name: str | None = None
        self._previous: dict[int, Any] = {}
        self._pipe = self._wakeup = -1

    @property
    def requested(self) -> bool:
        return self.name is not None

    def __enter__(self) -> "Stop":
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._wakeup = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(read,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: object) -> None:
        self.name = self.name or signal.Signals(number).name


def _watch(read: int) -> None:
    """Reads the numbers of signals as they come, also while the main thread compiles, until the pipe closes."""
    interrupts = 0
    while number := os.read(read, 1):
        interrupts += number[0] == signal.SIGINT
        if interrupts == 2:
            os._exit(128 + signal.SIGINT)
    os.close(read)
