"""The `quartet` command: its group of commands, and how it ends.

Exit status: 0 done; 1 it was tried and failed (the run failed, a prompt died); 2 it was refused (bad input or
configuration, a service that cannot be reached); 130 Ctrl-C.
"""

import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence

import click

from quartet_client.cli.backup import backup, restore
from quartet_client.cli.compare import compare
from quartet_client.cli.control import checkpoint, drain, pause, resume, rollback, stop
from quartet_client.cli.evaluate import evaluate
from quartet_client.cli.export import export
from quartet_client.cli.host import certs, contract_test, env
from quartet_client.cli.init import init
from quartet_client.cli.migrate import migrate_colossalchat
from quartet_client.cli.plot import plot
from quartet_client.cli.prompts import generate, submit
from quartet_client.cli.rescore import rescore
from quartet_client.cli.run import dashboard, run, sft, status, sweep, trace, watch
from quartet_client.cli.runs import audit, dead, runs
from quartet_client.cli.score import score
from quartet_client.errors import InputError, QuartetError
from quartet_client.terminal import print_error
from quartet_common.build import read_build
from quartet_common.config import ConfigError
from quartet_common.text import visible


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(read_build(), prog_name="quartet")
def cli() -> None:
    """Quartet: reinforcement learning of language models by four services."""


for command in (
    init,
    run,
    sft,
    sweep,
    submit,
    generate,
    score,
    rescore,
    status,
    watch,
    trace,
    dashboard,
    runs,
    pause,
    resume,
    checkpoint,
    stop,
    drain,
    rollback,
    audit,
    backup,
    restore,
    dead,
    evaluate,
    plot,
    compare,
    export,
    certs,
    env,
    contract_test,
    migrate_colossalchat,
):
    cli.add_command(command)


def _meant(argv: Sequence[str]) -> str:
    """Return what a refused command line may have meant, in the forms of other projects; "" if that is unknown."""
    if argv[:1] in (["train"], ["start"], ["launch"]):
        return "To train: quartet run FILE.toml"
    for before, word in zip(["", *argv], argv, strict=False):
        if before != "--set" and (key := re.fullmatch(r"-*([a-z_]+\.[a-z_.]+=.*)", word)):
            return f"A key of the run file is set by: --set {shlex.quote(key[1])}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; an error is one sentence on standard error."""
    try:
        status_code = cli.main(args=argv, prog_name="quartet", standalone_mode=False)
        return status_code if isinstance(status_code, int) else 0
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        click.echo(visible(shown.getvalue()), err=True, nl=False)
        if isinstance(error, click.UsageError) and (meant := _meant(sys.argv[1:] if argv is None else argv)):
            click.echo(meant, err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except (QuartetError, ConfigError) as error:
        print_error(error)
        return getattr(error, "exit_code", 2)
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        print_error(InputError(f"an argument or the input is not UTF-8: {error}"))
        return 2
    except BrokenPipeError:
        # The reader of our output is gone, e.g. of `quartet runs list | head -1`: discard the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is not None:
            print_error(InputError(f"'{error.filename}' cannot be used: {error.strerror}"))
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):  # a write's error has no name
            print_error(InputError(f"a file cannot be written ({error.strerror}); make room"))
        else:
            raise
        return 2
