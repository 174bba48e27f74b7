"""The scripts of ``dynamiq-ddp completion``, in the shells that they are for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiq_ddp.cli import main

BASH = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
$(complete -p dynamiq-ddp | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""

FISH = """
source $argv[1]
complete --do-complete "$argv[2..]" | string replace --regex '\\t.*' ''
true
"""

ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1= PS2= ; fpath=(${(q)1:h} \\$fpath); autoload -Uz compinit && compinit -u -D"
zpty -w shell "said() { print -r -- \\"<<\\$BUFFER>\\"\\">\\"; }; zle -N said; bindkey '^G' said; setopt menu_complete"
zpty -w shell 'print -r -- ready""now'
zpty -r shell line '*readynow*'
zpty -w -n shell "${*[2,-1]}"$'\\t\\a'
zpty -r shell line '*<<*>>*'
print -r -- ${${line##*<<}%%>>*}
"""
"""The shell completes what is typed as a user sees it, with the first candidate if there are several."""


@pytest.fixture
def completed(
    run_program: Callable[..., tuple[int, str, str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., list[str]]:
    """``completed(shell, program, *words)``: what a shell says if Tab is pressed after the last word."""

    def run(shell: str, program: str, *words: str) -> list[str]:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        assert main(["completion", shell]) == 0
        script = tmp_path / "scripts" / "_dynamiq-ddp"
        script.parent.mkdir()
        script.write_text(capsys.readouterr().out)
        status, out, err = run_program(
            [shell, "-c", program, *(["-"] * (shell != "fish")), str(script), *words], timeout=60
        )
        assert (status, err) == (0, "")
        return sorted(line.rstrip() for line in out.splitlines() if line)

    return run


CASES = [
    (["do"], ["doctor"]),
    (["comp"], ["compare", "completion"]),
    (["completion", ""], ["bash", "fish", "zsh"]),
    (["simulate", "--sch"], ["--schedules"]),
    (["bench", "--t"], ["--timeout", "--transport"]),
    (["compare", "--codecs", "mxfp8-"], ["mxfp8-e5m2"]),
    (["bench", "--schedules", "b"], ["butterfly"]),
    (["bench", "--transport", ""], ["gloo", "mpi", "nccl"]),
    (["demo", "--backend", "n"], ["numba"]),
]


@pytest.mark.parametrize(("words", "candidates"), [*CASES, (["bench", "--schedules", "ring", "b"], ["butterfly"])])
def test_bash_completes_commands_options_and_words(words, candidates, completed):
    assert completed("bash", BASH, "dynamiq-ddp", *words) == candidates


@pytest.mark.parametrize(("words", "candidates"), CASES)
def test_fish_completes_the_same(words, candidates, completed):
    assert completed("fish", FISH, "dynamiq-ddp", *words) == candidates


@pytest.mark.parametrize(("words", "candidates"), CASES)
def test_zsh_completes_the_same(words, candidates, completed):
    (line,) = completed("zsh", ZSH, "dynamiq-ddp", *words)
    assert line in [" ".join(["dynamiq-ddp", *words[:-1], candidate]) for candidate in candidates]


@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("fish", FISH), ("zsh", ZSH)])
def test_files_complete_where_files_belong(shell, program, completed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step100.pt").touch()
    found = completed(shell, program, "dynamiq-ddp", "compare", "step")
    assert [line.split()[-1] for line in found] == ["step100.pt"]
