"""The flag that a signal sets, so that a run is stopped between updates and never inside one."""

import signal
from typing import Any


class Stop:
    """Turns SIGTERM and SIGINT into a flag that the trainer polls between updates, then saves and exits 0.

        with Stop() as stop:
            while not done and not stop.requested: ...

    A second SIGINT kills at once, even inside compiled code; a repeated SIGTERM does not (launchers often send two).
    Main thread only. On leaving, the earlier handlers are back.

    requested  True once a signal came.
    name       the signal that came first, such as 'SIGTERM'; None before.
    """

    def __init__(self):
        self.name: str | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.name is not None

    def __enter__(self) -> "Stop":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: object) -> None:
        self.name = self.name or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
