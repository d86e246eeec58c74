"""Scripts are read as bash runs them: bash itself is the oracle, with programs that print what they are given."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
from collections.abc import Sequence

import pytest

from megatron_rl.commands.translate.shell.reading import Script, read_script
from megatron_rl.commands.translate.shell.words import ScriptError, TooLong

RUN = r"""
command_not_found_handle() { { printf "%s\0" "$@"; printf "\1\0"; } >&9; }
basename() { echo "${1##*/}"; }
dirname() { echo "${1%/*}"; }
exec 9>&1 >/dev/null 2>&1
for script; do (set --; eval "$script"); printf "\2\0" >&9; done
"""


def bash_calls(scripts: Sequence[str], folder: pathlib.Path) -> list[list[list[str]]]:
    """Return each script's command lines as bash runs it, where no program is found and each prints its words."""
    done = subprocess.run(
        ["/bin/bash", "-c", RUN, "run.sh", *scripts],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        cwd=folder,
        env={"PATH": "/nonexistent", "HOME": os.environ["HOME"], "LC_ALL": "C.UTF-8"},
    )
    runs = done.stdout.decode().split("\2\0")[:-1]
    return [[call.split("\0")[:-1] for call in run.split("\1\0")[:-1]] for run in runs]


def our_calls(script: Script) -> list[list[str]]:
    assert not any(word.depends for call in script.calls for word in call.words)
    return [[word.text for word in call.words] for call in script.calls]


FORMS = {
    "DAPO's lengths": "a=$((1024 * 2)); b=$((1024 * 8))\npython x.p=$((a + b)) x.r=${b} 'x.l=[\"c\",\"d\"]' $@",
    "division, powers, bases": "python $((7 / -2)) $((-7 % 3)) $((2 ** 10)) $((0x1F + 010 + 2#101)) $((1 << 4 | 3))",
    "choices, signs": "n=3; python $((n > 2 ? n * 2 : 0)) $((!n + ~n)) $((-n - -1)) $(((n + 1) * 10 / 10)) $((n&&0))",
    "a variable of a variable": 'a=b+1; b=4; python $((a * 2)) "$(( ${b} * 2 ))"',
    "defaults": 'python ${A:-x} ${A-y} "${A:-"p q"}" ${A:=z} $A ${A:+set} ${B:+set} ${1:-first} "${2-}" ${C:-$A$A}',
    "empty and unset": 'A=; python ${A:-x} [${A-y}] "$A" $A ${A:+s}${A+t} "${B:-}" end',
    "no words of nothing": 'E=(); python "${E[@]}" "$@" ${E[@]} "" a""b',
    "arrays": 'R=(a.b=1 "c d" e); R+=(f.g=${R[0]}); python "${R[@]}" ${R[@]} "${R[*]}" ${R[1]} ${#R[@]} "x${R[@]}y"',
    "arrays over lines": "R=(\n  a.b=1  # one\n\n  # c.d=2\n  e.f='3 4'\n)\npython ${R[@]}",
    "splitting": 'A=" p  q "; python $A x$A"y" x"$A"y "${A}" $A$A',
    "quotes": "python 'a$b' \"c\\\"d\\$e\\\\f\" g\\ h $'i\\tj' \"k'l'\" 'm\"n' \"a\\qb\" o\\\np",
    "comments end a line": "python a.b=1 \\\n  # c.d=2 \\\n  e.f=3\npython g#h # i",
    "a blank behind the backslash": "python a.b=1 \\ \n c.d=2",
    "cut and replaced": "A=/m/Q-7B.sh; python ${A##*/} ${A%.*} ${A%%-*} ${A#/m/} ${A/Q/q} ${A//[0-9]/N} ${A:3:4}",
    "letters": 'A=/m/Q-7b; python ${A^^} ${A,,} ${#A} ${A: -2}',
    "tilde, paths": 'A=~/x; python $A ~/y "~/z" $(basename /a/b.c) $(dirname /a/b.c) "$(pwd)/x" $(cd a && pwd)',
    "if": 'A=x; if [ "$A" = y ]; then B=1; elif [[ $A == x* && -n $A ]]; then B=2; else B=3; fi; python $B',
    "tests": '[ 3 -gt 2 ] && python 1; [ -z "" -o a = b ] && python 2; [[ ! a == b ]] || python 3; test a',
    "patterns": 'A=qwen3; [[ $A == "q*" ]] && python 1; [[ $A == q?en[0-9] ]] && [[ (a == b || a == a) ]] && python 2',
    "numbers": "N=8; if (( N > 4 )); then python b; fi; if [ $N -le 4 ]; then python s; fi; ((N < 4)) || python n",
    "case": 'for m in 7b 32b x; do case "$m" in 7b | 8b) python s;; 3*) python m $m;; *) python other;; esac; done',
    "functions": 'run() { local n=$1; shift; python n=$n "$1" "${2:-two}" $#; }; run 1 x; function f { run 2 a b; }; f',
    "groups": "A=1; (A=2; python $A); python $A; { A=3; python $A; }; false || { python no; }; ! true || python yes",
    "here-document": 'cat <<EOF\npython a.b=1 "\nEOF\npython <<-"E" x > log 2>&1\n\tit\'s\n\tE\npython y 2>&1 >log',
    "declared": 'export A=1 B="2 3"; declare -a R=(x y); C=$A; python $A "$B" ${R[1]} $C; unset A; python [${A:-none}]',
    "prefixed": "A=1; A=2 NCCL=1 python $A; python A=3",
    "loops": "for a in 1 2; do for b in x y; do [ $a$b = 2x ] && break; python $a $b; done; done; exit 0\npython never",
    "braces": "python {a,b}.c x{1,2}y '{p,q}' \"{r,s}\" {t} +u={v:1,w:2}",
    "appended": "A=x; A+=y; A+=$A; python $A; R=(1); R+=(2 3); python ${R[@]:1} ${R[-1]}",
}


@pytest.mark.process
def test_the_forms_of_launch_scripts_are_read_as_bash_runs_them(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for (name, script), theirs in zip(FORMS.items(), bash_calls([*FORMS.values()], tmp_path), strict=True):
        assert our_calls(read_script(script, "run.sh", {})) == theirs, name


class Author:
    """Writes scripts at random, of variables that are all known."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def sum(self, depth: int = 2) -> str:
        if depth == 0:
            return self.random.choice(["n", "m", "$n", "${m}", "0", "7", "-3", "010"])
        left, right = self.sum(depth - 1), self.sum(depth - 1)
        operator = self.random.choice(["+", "-", "*", "<", "==", "&&", "||", "& ", "| ", "^"])
        forms = [f"({left} {operator} {right})", f"{left} {operator} {right}", f"{left} / 7 % 5"]
        forms.append(f"{left} ? {right} : n")
        return self.random.choice(forms)

    def part(self, lists: bool) -> str:
        name, text = self.random.choice("abn"), self.random.choice(["7b", "a.b=1", "p q", "x*", "", "2", "#n", "-1"])
        forms = [f'"{text}"', "'p$x'", "k\\ l", name, f"${{{name}}}", f'"${name}"', f"$(({self.sum()}))"]
        forms += [f'"${{{name}:-{text}}}"', f"${{z:-{text}}}", f"${{{name}%%[0-9]*}}", f'"${{{name}#?}}"']
        forms.append(f"${{#{name}}}")
        forms += [f"${{{name}:+{text}}}"]
        if lists:
            forms += ["${r[@]}", '"${r[@]}"', "${r[1]}${#r[@]}"]
        return self.random.choice(forms)

    def word(self, lists: bool = False) -> str:
        return "".join(self.part(lists) for _ in range(self.random.randint(1, 3)))

    def line(self, depth: int = 2) -> str:
        match self.random.randint(0, 3 if depth == 0 else 8):
            case 0:
                return f"{self.random.choice('ab')}{self.random.choice(['=', '+='])}{self.word()}"
            case 1:
                return f"n=$(( {self.sum()} ))"
            case 2:
                return f"r{self.random.choice(['=', '+='])}({self.word()} {self.word()})"
            case 3:
                return f"python {self.word(True)} \\\n  {self.word(True)} # {self.word()}"
            case 4:
                return f'if [ "$a" = {self.text()} ]; then\n{self.line(depth - 1)}\nelse\n{self.line(depth - 1)}\nfi'
            case 5:
                body, other = self.line(depth - 1), self.line(depth - 1)
                return f"if [[ $a == *{self.text()}* || $n -gt 9 ]]; then {body}\nelif ((m)); then {other}\nfi"
            case 6:
                body, other = self.line(depth - 1), self.line(depth - 1)
                return f'case "$b" in\n  {self.text()}) {body}\n ;;\n  *b*|p*) {other}\n ;;\nesac'
            case 7:
                return f"for a in x {self.text()}; do\n{self.line(depth - 1)}\ndone"
        return f'[[ -n "$a" ]] && python {self.word()}; ! [ "$n" -lt 5 ] || python {self.word()}'

    def text(self) -> str:
        return self.random.choice(["7b", "2", '""', "'p q'"])

    def script(self) -> str:
        lines = [self.line() for _ in range(self.random.randint(3, 8))]
        return "\n".join(["a=7b; b='p q'; n=3; m=-2; r=(a.b=1 'c d')", *lines, 'python "$a" $b $n "${r[@]}"'])


@pytest.mark.process
def test_random_scripts_are_read_as_bash_runs_them(tmp_path: pathlib.Path) -> None:
    scripts = [Author(seed).script() for seed in range(80)]
    for script, theirs in zip(scripts, bash_calls(scripts, tmp_path), strict=True):
        assert our_calls(read_script(script, "run.sh", {})) == theirs, script


BRANCHES = """
bsz=64; len=512; lr=1
if [ "$1" = npu ]; then bsz=32; extra=(x.y=1); fi
[ -f env.sh ] && lr=2
if nvidia-smi; then len=1024; else len=256; fi
case $GPU in a100) mem=40;; *) mem=80;; esac
while [[ $# -gt 0 ]]; do lr=$1; shift; done
for i in $(seq 3); do lr=3; done
python d.b=$bsz d.l=$len d.m=$mem o.lr=$lr "${extra[@]}" d.t=$1 d.n=${NODES:-2}
"""


def test_a_branch_whose_condition_is_not_known_is_named_and_not_taken() -> None:
    found = read_script(BRANCHES, "run.sh", {})
    command = {word.text: word.depends for word in found.calls[-1].words}
    assert command == {
        "python": (),
        "d.b=64": (),
        "d.l=$len": ("nvidia-smi",),  # each side would change it
        "d.m=$mem": ("case $GPU",),
        "o.lr=1": (),
        "$extra": ('[ "$1" = npu ]',),
        "d.t=$1": ("$1",),
        "d.n=2": (),
    }
    assert [(branch.condition, branch.holds) for branch in found.branches] == [
        ('[ "$1" = npu ]', ("bsz=32", "extra=(x.y=1)")),
        ("[ -f env.sh ]", ("lr=2",)),
        ("nvidia-smi", ("len=1024", "len=256")),
        ("case $GPU", ("mem=40", "mem=80")),
        ("while [[ $# -gt 0 ]]", ("lr=$1",)),
        ("for i in $(seq 3)", ("lr=3",)),
    ]
    told = read_script(BRANCHES, "run.sh", {"1": "npu", "GPU": "a100"}).calls[-1]
    assert [word.text for word in told.words if not word.depends] == [
        *("python", "d.b=32", "d.m=40", "o.lr=1", "x.y=1", "d.t=npu", "d.n=2")
    ]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("python 'a", "line 1: \"'a\" is not closed"),
        ("a=1\nif true; then\npython", "line 3: the script's end is not expected"),
        ("x=$(( 1 +", "line 1: '\\$\\(\\( 1 \\+' is not closed"),
        ("{ " * 60 + "python" + "; }" * 60, "more than 50 deep"),
        ("f() { f; }; f", "f\\(\\) calls itself"),
        ("for a in 1 2 3 4 5 6 7 8 9 0; do " * 5 + ":" + "; done" * 5, "more than 20000 statements"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(script: str, why: str) -> None:
    with pytest.raises((ScriptError, TooLong), match=why):
        read_script(script, "run.sh", {})


def test_deep_forms_end_without_recursion() -> None:
    deep = ("[[ " + "( " * 2000 + "a" + " )" * 2000 + " ]]", "! " * 2000 + "true", "[ " + "! " * 2000 + "a ]")
    for script in (*deep, "python " + "<<a " * 2000 + "\na\n" * 2000):
        assert len(read_script(f"{script}\npython x", "run.sh", {}).calls) > 0
