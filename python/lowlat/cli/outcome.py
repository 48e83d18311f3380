"""How a command ends: exit statuses, and the exceptions that carry one line to the user."""

DONE = 0
REFUSED = 1
USAGE = 2
FAULT = 3

# Closes every command's --help.
EXIT_STATUSES = """\
exit status:
  0  done
  1  refused, or a check that failed; no file was written
  2  the command line is wrong
  3  fault: a part of the installation is missing, or the world failed
"""


class CommandError(Exception):
    """Ends the command with one line on stderr and `exit_status`."""

    exit_status = FAULT


class RefusedError(CommandError):
    """The input or the request is not acceptable; the line says what was seen and needed."""

    exit_status = REFUSED


class UsageError(CommandError):
    """The command line itself is wrong."""

    exit_status = USAGE


class FaultError(CommandError):
    """The world failed: a missing part of the installation, a device error, a passed deadline."""

    exit_status = FAULT


def one_line(error: BaseException | str) -> str:
    """The words of `error` on one line; its type's name where it has no words."""
    words = " ".join(str(error).split())
    return words or type(error).__name__
