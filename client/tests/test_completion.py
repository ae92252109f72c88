"""Shell completion, in a real bash."""

import os
import shutil
import subprocess
import sys

import pytest

BASH = shutil.which("bash")


WANTED = {
    "quartet tra": {"trace"},
    "quartet certs issue --ro": {"--role"},
    "quartet certs issue --role rew": {"reward"},
}


@pytest.mark.skipif(BASH is None, reason="there is no bash here")
def test_bash_completes_commands_options_and_values(tmp_path):
    (tmp_path / "quartet").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quartet_client "$@"\n')
    (tmp_path / "quartet").chmod(0o755)
    script = [
        'eval "$(_QUARTET_COMPLETE=bash_source quartet)" || exit 3',
        'function=$(complete -p quartet | sed -E "s/.*-F ([^ ]+).*/\\1/")',
    ]
    # As bash itself does at a Tab: the words, and which of them the cursor is in, for the registered function.
    for words in WANTED:
        script += [
            f"COMPREPLY=() COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))",
            '$function quartet "${COMP_WORDS[COMP_CWORD]}" ""',
            'echo "${COMPREPLY[*]}"',
        ]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [BASH, "--norc", "--noprofile", "-c", "\n".join(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(WANTED.values())
