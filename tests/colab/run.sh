#!/usr/bin/env bash
# The tests with Google Colab's versions, as `make test-colab` starts them: run.sh [PYTEST_OPTION ...]
#
# 1. In VENV_COLAB (Python 3.11, for which PyTorch comes as a CPU build): the tests of what these versions can change,
#    the panel in the classic notebook with ipywidgets 7.7.1, and all notebooks.
# 2. In VENV_COLAB_NEWER (Python 3.13, which Colab has, else 3.12; without PyTorch): the panel's tests in a kernel, and
#    the TensorFlow notebooks. Skipped where neither Python is here.
#
# What is missing is skipped with a line that says why; with CI=true that is a failure, but for the newer Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${VENV_COLAB:=.venv-colab}" "${VENV_COLAB_NEWER:=.venv-colab-newer}" "${JOBS:=2}"
# debugpy of this time remarks on Python 3.11 at the start of each kernel
export PYDEVD_DISABLE_FILE_VALIDATION=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# PyTorch, plans and verdicts are the same with these versions: they are tested once, by `make unit`.
tests=(checks colab curves data diagnose figure history labels layers live own_model probing program_repeats
    programs_jax programs_keras resume run studio studio_kernel studio_runs studio_spread worker)
same="(test_resume or test_program_repeats) and (pytorch or ddp or fsdp or shards or gpu)"
newer_tests=(colab copies curves figure history own_model)

# Old packages use what newer ones call deprecated. ipywidgets 7 calls arguments so that it does not know, and ignores
# them: those are ours.
warnings=(-W ignore::DeprecationWarning -W "error:Passing unrecognized arguments:DeprecationWarning")
tests=("${tests[@]/#/tests/test_}")
newer_tests=("${newer_tests[@]/#/tests/test_}")
failed=0

# environment FOLDER EXTRAS VERSION ... : makes or renews it with the first of these Pythons that is here; false if none
environment() {
    local folder=$1 extras=$2 version candidate found=""
    shift 2
    if ! "$folder/bin/python" -c pass 2>/dev/null; then
        for version in "$@"; do
            # also where pyenv keeps versions that no command leads to
            for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python python3; do
                local right="import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"
                if [ -z "$found" ] && "$candidate" -c "$right" >/dev/null 2>&1; then found=$candidate; fi
            done
        done
        if [ -z "$found" ]; then
            echo "accel_nb: skipped: no Python $* with its modules venv and ensurepip is on this machine"
            return 1
        fi
        echo "accel_nb: making $folder with $("$found" --version)"
        rm -rf "$folder"
        "$found" -m venv "$folder"
        echo '*' >"$folder/.gitignore"
    fi
    if [ ! "$folder/installed" -nt pyproject.toml ] || [ ! "$folder/installed" -nt tests/colab/constraints.txt ]; then
        echo "accel_nb: installing Colab's versions into $folder (minutes, once)"
        "$folder/bin/python" -m pip install -qq -c tests/colab/constraints.txt -e ".[$extras]" notebook || exit 1
        touch "$folder/installed"
    fi
}

# run FOLDER OPTION ... : pytest in an environment, several tests at a time
run() {
    local python="$1/bin/python"
    shift
    "$python" -m pytest "${warnings[@]}" -n "$JOBS" --dist worksteal "$@" || failed=1
}

# nbval FOLDER NOTEBOOK ... : the notebooks, run and compared
nbval() {
    local python="$1/bin/python"
    shift
    "$python" tests/notebook_files.py check -W=ignore::DeprecationWarning "$@" || failed=1
}

if environment "$VENV_COLAB" pytorch,tensorflow,jax,test 3.11 3.12 3.13; then
    echo "accel_nb: tests with Colab's versions, $JOBS at a time"
    run "$VENV_COLAB" tests/colab "${tests[@]/%/.py}" -k "not ($same)" "$@"
    echo "accel_nb: the notebooks with Colab's versions"
    nbval "$VENV_COLAB" "$@"
elif [ -n "${CI:-}" ]; then
    failed=1
fi
if environment "$VENV_COLAB_NEWER" tensorflow,jax,test 3.13 3.12; then
    echo "accel_nb: the panel and the TensorFlow notebooks with Colab's versions on $("$VENV_COLAB_NEWER/bin/python" --version)"
    run "$VENV_COLAB_NEWER" tests/colab/test_kernel.py "${newer_tests[@]/%/.py}" "$@"
    nbval "$VENV_COLAB_NEWER" notebooks/*tensorflow*.ipynb "$@"
fi
exit "$failed"
