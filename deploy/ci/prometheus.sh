#!/usr/bin/env bash
# Debian's `prometheus` and `promtool`, for tests: unpacked into a folder and not installed, so that no
# daemon is started. Needs apt's sources, and root only where apt has no lists yet.
#
#   deploy/ci/prometheus.sh        makes the folder if it is not there, and prints where the programs are
#
# Folder: $QUIRE_PROMETHEUS, by default /var/tmp/quire-prometheus; the tests look there too.
set -euo pipefail

folder=${QUIRE_PROMETHEUS:-/var/tmp/quire-prometheus}
programs=$folder/usr/bin

download() { apt-get -qq -o APT::Sandbox::User=root download prometheus; }

if [[ ! -x $programs/prometheus ]]; then
  command -v apt-get >/dev/null || { echo "prometheus.sh: no apt here; put prometheus and promtool into PATH" >&2; exit 1; }
  mkdir -p "$(dirname "$folder")"
  making=$(mktemp -d "$folder.XXXXXX")
  trap 'rm -rf "$making"' EXIT
  cd "$making"
  download 2>/dev/null || { apt-get -qq update >&2; download; }
  dpkg-deb -x prometheus_*.deb tree
  rm -rf "$folder"
  mv tree "$folder"
fi
"$programs/prometheus" --version >&2
echo "$programs"
