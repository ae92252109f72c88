"""`quartet completion`: what a shell needs to complete the command line."""

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_QUARTET_COMPLETE"  # what Click asks the command for completions by; see its "Shell Completion"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the completion script of SHELL, to be sourced by its start-up file.

    \b
    bash  eval "$(quartet completion bash)"         in ~/.bashrc
    zsh   eval "$(quartet completion zsh)"          in ~/.zshrc, after compinit
    fish  quartet completion fish | source          in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # Click has these three
    click.echo(_source(kind(context.find_root().command, {}, "quartet", _VARIABLE)))
    return 0


def _source(script: object) -> str:
    # Click's method first asks the bash of this machine for its version; whoever asks may prepare it for another.
    return script.source_template % script.source_vars()  # type: ignore[attr-defined]
