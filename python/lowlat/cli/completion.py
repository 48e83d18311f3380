"""``lowlat completion``: the script by which a shell completes ``lowlat``.

The engine writes the script: it knows its own commands, and is told the ones that are Python's.
"""

import argparse
import json
from typing import Any

from lowlat.cli import engine
from lowlat.cli.outcome import DONE, EXIT_STATUSES, FaultError, one_line

NAME = "completion"
SHELLS = ("bash", "zsh", "fish")
BUDGET_S = 30

DESCRIPTION = """\
Prints the script that makes a shell complete lowlat's commands, options and files. To load it:

  bash:  lowlat completion bash > ~/.local/share/bash-completion/completions/lowlat
         (or, for this shell only: source <(lowlat completion bash))
  zsh:   lowlat completion zsh > "${fpath[1]}/_lowlat"
  fish:  lowlat completion fish > ~/.config/fish/completions/lowlat.fish
"""

EPILOG = EXIT_STATUSES


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        NAME,
        help="print the completion script for a shell",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from lowlat.cli.main import build_parser

    words = ["completion", arguments.shell, "--commands", "-"]
    done = engine.ask(words, BUDGET_S, told=json.dumps(describe(build_parser())))
    if done.returncode != 0:
        raise FaultError(one_line(done.stderr))
    print(done.stdout, end="")
    return DONE


def describe(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The commands of `parser` that are not the engine's, as ``lowlat-engine completion`` reads
    them."""
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    return [
        {
            "name": name,
            "about": helps[name],
            "options": [
                describe_option(action)
                for action in command._actions
                if not isinstance(action, argparse._HelpAction)
            ],
        }
        for name, command in commands.choices.items()
        if name not in engine.COMMANDS
    ]


def describe_option(action: argparse.Action) -> dict[str, Any]:
    long = [word for word in action.option_strings if word.startswith("--")]
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if not action.option_strings:
        kind = "positional"
    elif action.nargs == 0:
        kind = "flag"
    elif "DIR" in metavar.split("|"):
        kind = "file"  # where a folder goes, a file of it does too
    else:
        kind = "file" if metavar == "FILE" else "value"
    words = (action.help or "") % {"default": action.default}
    return {
        "name": long[0].removeprefix("--") if long else action.dest,
        "about": words,
        "kind": kind,
        "choices": [str(choice) for choice in action.choices or ()],
    }
