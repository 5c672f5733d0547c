"""`python -m accel_nb accelerators` and `python -m accel_nb train ...`: the notebook's calls from a shell."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from typing import Any

from accel_nb.errors import AccelNbError


def value(text: str) -> Any:
    """A field's value: a Python literal where it is one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parser() -> argparse.ArgumentParser:
    from accel_nb.plan import Plan

    top = argparse.ArgumentParser(prog="python -m accel_nb", description="Train a model on the accelerator here.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("accelerators", help="what is here, usable from what, and why not")
    train = commands.add_parser(
        "train",
        help="train a model; each field of a Plan is an option",
        epilog="Values are Python literals: --model_args \"{'layers': [128], 'dropout': 0}\" --epochs 3",
    )
    for field in dataclasses.fields(Plan):
        default = field.default if field.default is not dataclasses.MISSING else {}
        names = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        train.add_argument(
            *names, dest=field.name, type=value, default=argparse.SUPPRESS, help=f"default {default}"
        )
    train.add_argument("--directory", default=None, help="folder for the run's directory, default runs")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 1 if a run failed; 2 for a request that cannot be carried out."""
    asked = vars(parser().parse_args(arguments))
    command = asked.pop("command")
    import accel_nb

    try:
        if command == "accelerators":
            print(accel_nb.accelerators())
        else:
            accel_nb.train(**asked)
    except accel_nb.RunFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    except AccelNbError as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
