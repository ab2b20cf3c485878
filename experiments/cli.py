"""What every command under experiments/ shares: flags whose errors are one line, and an exit code for each way to end.

0 done, or stopped by a signal with the state saved; 1 training went wrong; 2 bad input. jax is not imported here, so
`--help` and a misspelt flag answer at once.
"""

import difflib
import functools
import json
import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections.config_flags import config_flags

HELP = ("--help", "-help", "--helpshort", "-h")


def fail(message: object, code: int = 2) -> NoReturn:
    """Says on stderr, in one line, what is wrong, and exits."""
    print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    sys.exit(code)


class Flags:
    """The flags of one app: `FLAGS.integer("seed", 0, "...")` is `absl.flags.DEFINE_integer` with values of its own.

    So two apps can be imported together and both have a --seed. `run` gives them to absl.
    """

    def __init__(self) -> None:
        self.values = flags.FlagValues()

    def __getattr__(self, kind: str) -> Callable[..., flags.FlagHolder]:
        return functools.partial(getattr(flags, f"DEFINE_{kind}"), flag_values=self.values)

    def take_over(self) -> None:
        """Makes them the flags of this process, the ones that --help shows."""
        flags.FLAGS.append_flag_values(self.values)
        for name in self.values:
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
        self.values.mark_as_parsed()


def config_file(default: str | None = None) -> flags.FlagHolder | flags.Flag:
    """Defines --config, locked, once per process however many apps are imported; `.value` is the config."""
    if "config" in flags.FLAGS:
        return flags.FLAGS["config"]
    text = "config file; --config.x.y=value sets a field"
    return config_flags.DEFINE_config_file("config", default, text, lock_config=True)


def chosen(names: Sequence[str], known: Iterable[str], flag: str) -> list[str]:
    """The names that a list flag asks for, all that are known when it is empty.

    Raises: base.InputError for one that is not known, with the nearest that is.
    """
    from rsi_jax import base

    known = list(known)
    for name in names:
        if name not in known:
            raise base.InputError(f"--{flag} has '{name}', which is none{base.did_you_mean(name, known)}")
    return list(names or known)


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows (JSON lines) that an experiment has finished; none when it never ran."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def one_line(message: object) -> str:
    """Folds a message into one line."""
    return " ".join(str(message).split())


def fields_of(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lists the dotted names of a nested config: groups and fields."""
    found = []
    for name, value in config.items():
        found.append(prefix + name)
        if isinstance(value, Mapping):
            found += fields_of(value, f"{prefix}{name}.")
    return found


def nearest(name: str, fields: Sequence[str]) -> str | None:
    """Finds the field that a misspelt dotted name most likely means: one of the same last part first."""
    last = name.rpartition(".")[2]
    same = [field for field in fields if field.rpartition(".")[2] == last]
    found = difflib.get_close_matches(name, same, 1, cutoff=0.0) or difflib.get_close_matches(
        name, fields, 1, cutoff=0.5
    )
    return found[0] if found else None


def misspelt(argv: Sequence[str], config: Any, flag: str = "config") -> str | None:
    """Names the first `--config.x.y` of a command line that is no field of the config, and the nearest that is."""
    fields = fields_of(config.to_dict())
    for argument in argv:
        match = re.match(rf"--?(?:no)?{flag}\.([^=]+)", argument)
        if match and match[1] not in fields:
            near = nearest(match[1], fields)
            groups = ", ".join(field for field in fields if "." not in field)
            mend = f"; did you mean --{flag}.{near}?" if near else f" (it has {groups})"
            return f"--{flag}.{match[1]} is no field of the config{mend}"
    return None


def config_path(argv: Sequence[str], flag: str = "config") -> str | None:
    """Finds the value of --config on a command line."""
    for i, argument in enumerate(argv):
        if match := re.fullmatch(rf"--?{flag}(?:=(.*))?", argument):
            return match[1] if match[1] is not None else argv[i + 1] if i + 1 < len(argv) else None
    return None


def parse(argv: list[str]) -> list[str]:
    """Parses the flags for absl; any error is one line and exit code 2."""
    if any(argument in HELP for argument in argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.exit(0)
    path = config_path(argv[1:])
    if "config" in flags.FLAGS:
        if not path:
            fail("--config is missing: give a file such as --config=configs/tool_calls.py")
        if not os.path.isfile(path.split(":", 1)[0]):
            fail(f"--config={path}: no such file")
        try:
            config = config_flags.ConfigFileFlagParser("config").parse(path)
        except Exception as error:  # whatever the config file raises; its own last line says what
            fail(f"--config={path}: {type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}")
        if fault := misspelt(argv[1:], config):
            fail(fault)
    try:
        rest = flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        fail(error)
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING  # what libraries report by the way is not for people
    if rest[1:]:
        fail(f"unexpected argument {rest[1]!r}: values are given as --flag=value")
    return rest


def run(main: Callable[[list[str]], None], own: Flags) -> None:
    """Runs a command: parses its flags, calls `main`, and turns what it raises into a line and an exit code."""
    own.take_over()
    app.run(functools.partial(_guarded, main), flags_parser=parse)


def _guarded(main: Callable[[list[str]], None], argv: list[str]) -> None:
    interrupted = []

    def interrupt(*_: object) -> NoReturn:
        interrupted.append(True)  # C extensions that load may turn the exception into another
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):  # until the trainer takes signals over
        signal.signal(number, interrupt)
    try:
        main(argv)
    except (Exception, KeyboardInterrupt) as error:
        code = 0 if interrupted else code_of(error)
        if code is None:
            raise
        if code:
            print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(code)  # threads of a library still in mid-write (a full disk) would bury the line in tracebacks
        stopped = "stopped before there was anything to save; the same command starts again"
        print(one_line(error) or stopped, file=sys.stderr)


def code_of(error: BaseException) -> int | None:
    """The exit code of an error that one line explains; None: an error of ours, which keeps its traceback."""
    from rsi_jax import base, train

    codes = {train.Stopped: 0, base.InputError: 2, FloatingPointError: 1, train.ParityError: 1}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)
