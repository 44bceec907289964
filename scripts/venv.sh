#!/bin/sh
# Makes a virtual environment: scripts/venv.sh PYTHON FOLDER.
# Debian and Ubuntu ship Python without venv; root gets the package, others are told its name.
set -eu
python=$1 folder=$2
if "$python" -m venv "$folder" > /dev/null 2>&1 || "$python" -m virtualenv "$folder" > /dev/null 2>&1; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  echo "installing python3-venv" >&2
  { apt-get update && apt-get install -y --no-install-recommends python3-venv; } > /dev/null
  rm -rf "$folder"
  exec "$python" -m venv "$folder"
fi
echo "cannot make a virtual environment; on Debian and Ubuntu: sudo apt-get install python3-venv" >&2
exit 1
