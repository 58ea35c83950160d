#!/usr/bin/env bash
# A Docker engine with the compose plugin on a bare Debian machine, for tests. Needs root and Debian's mirror.
#
#   eval "$(deploy/ci/docker_engine.sh start)"     sets DOCKER_HOST and DOCKER_CONFIG where that is needed
#   deploy/ci/docker_engine.sh base python:3.11-slim
#   deploy/ci/docker_engine.sh stop                ends the daemon that `start` started, no other one
#
# start: takes the engine that answers already. Else it installs Debian's docker.io and, where nothing starts
#        that as a service, runs a daemon of its own. The compose plugin comes from a later Debian, unpacked
#        beside the rest and not installed.
# base:  makes sure that an image is here: pulled, or, where no registry is reached, put together from
#        Debian's packages under the same name (Debian's own Python of that version, pip, CA certificates).
#
# State: $QUIRE_DOCKER_STATE, by default /var/tmp/quire-docker; short, since it holds a socket. Removed
# after `stop`, the next start is a cold one. Notes go to standard error, settings to standard output.
set -euo pipefail

state=${QUIRE_DOCKER_STATE:-/var/tmp/quire-docker}
socket=unix://$state/docker.sock
plugin_suite=trixie # the first Debian that packages the plugin, and runs where libc6 >= 2.34
export DEBIAN_FRONTEND=noninteractive

note() { echo "docker_engine: $*" >&2; }
fail() { note "$*"; exit 1; }
answers() { timeout 20 docker info >/dev/null 2>&1; }

timed() { # what, command...: runs it and notes how long it took
  local what=$1 start=$SECONDS
  shift
  "$@" && note "$what: $((SECONDS - start)) s"
}

mirror() { # the mirror that apt uses already
  local found
  found=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | grep -m1 '/debian/\?$' ||
    sed -n 's/^deb \(\[[^]]*\] \)\?\([^ ]*\).*/\2/p' /etc/apt/sources.list 2>/dev/null | grep -m1 '/debian/\?$' || true)
  echo "${found:-http://deb.debian.org/debian}"
}

codename() { (. /etc/os-release && echo "$VERSION_CODENAME"); }

# Packages ----------------------------------------------------------------------------------------

install() { # packages...
  [[ $(id -u) == 0 ]] || fail "needs root to install $*"
  [[ -f /etc/debian_version ]] || fail "installs with apt only; install $* yourself"
  apt-get update -qq >&2 || note "apt-get update failed, trying with the lists there are"
  apt-get install -y -qq --no-install-recommends "$@" >"$state/apt.log" 2>&1 ||
    { tail -5 "$state/apt.log" >&2; fail "apt-get could not install $*"; }
}

fetch_plugin() { # the compose plugin out of its package
  local lists=$state/apt
  mkdir -p "$lists"/{sources,lists/partial,cache/archives/partial} "$state/config/cli-plugins"
  cat >"$lists/sources/plugin.sources" <<END
Types: deb
URIs: $(mirror)
Suites: $plugin_suite
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
  local options=(-qq -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$lists/sources"
    -o "Dir::State::Lists=$lists/lists" -o "Dir::Cache=$lists/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update >&2
  (cd "$lists" && rm -rf ./*.deb tree && apt-get "${options[@]}" download docker-compose >&2 &&
    dpkg-deb -x docker-compose_*.deb tree &&
    mv tree/usr/libexec/docker/cli-plugins/docker-compose "$state/config/cli-plugins/")
  rm -rf "$lists"
}

# The daemon --------------------------------------------------------------------------------------

own_pid() { # pid of the daemon that an earlier `start` left, if it still runs
  local pid
  pid=$(cat "$state/docker.pid" 2>/dev/null) || return 1
  [[ $(cat "/proc/$pid/comm" 2>/dev/null) == dockerd ]] && echo "$pid"
}

run_daemon() {
  [[ $(id -u) == 0 ]] || fail "needs root to start a daemon"
  # A daemon that was killed leaves these behind, and the next one would take it for running.
  rm -f "$state/docker.pid" "$state/exec/containerd/containerd.pid"
  # An empty configuration of its own, so that one of the machine's is not picked up.
  echo '{}' >"$state/daemon.json"
  setsid dockerd --data-root "$state/root" --exec-root "$state/exec" --host "$socket" \
    --pidfile "$state/docker.pid" --config-file "$state/daemon.json" \
    >"$state/dockerd.log" 2>&1 </dev/null 9>&- &
  local tries
  for ((tries = 0; tries < 240; tries++)); do
    DOCKER_HOST=$socket answers && return
    sleep 0.25
  done
  tail -5 "$state/dockerd.log" >&2
  fail "the daemon did not start"
}

start() {
  mkdir -p "$state"
  exec 9>"$state/lock" && flock 9
  if ! answers; then
    command -v docker >/dev/null && command -v dockerd >/dev/null ||
      timed "installed docker.io" install docker.io iptables ca-certificates
    if ! answers; then # nothing here starts services
      { own_pid >/dev/null && DOCKER_HOST=$socket answers; } || timed "daemon" run_daemon
      export DOCKER_HOST=$socket
      echo "export DOCKER_HOST=$socket"
    fi
  fi
  note "engine $(docker version --format '{{.Server.Version}}') at ${DOCKER_HOST:-the default address}"
  if ! docker compose version >/dev/null 2>&1; then
    [[ -x $state/config/cli-plugins/docker-compose ]] || timed "compose plugin" fetch_plugin
    export DOCKER_CONFIG=$state/config
    echo "export DOCKER_CONFIG=$state/config"
  fi
  docker compose version >&2
}

stop() {
  local pid
  pid=$(own_pid) || return 0
  # What newer builds have replaced; without this the state grows with every run.
  DOCKER_HOST=$socket docker image prune -f >/dev/null 2>&1 || true
  DOCKER_HOST=$socket docker builder prune -f --keep-storage 3GB >/dev/null 2>&1 || true
  kill "$pid"
  while [[ -e /proc/$pid && $(sed 's/.*) //; s/ .*//' "/proc/$pid/stat" 2>/dev/null) != Z ]]; do sleep 0.1; done
  note "daemon stopped"
}

# The base image ----------------------------------------------------------------------------------

debian_image() { # name: Debian with its own Python, under that name
  local version image=$1 hook=$state/hook.sh bundle=/etc/ssl/certs/ca-certificates.crt
  version=$(sed -n 's/.*python:\([0-9.]*\).*/\1/p' <<<"$image")
  [[ -n $version ]] || fail "cannot make $image, only python:VERSION-slim"
  apt-cache show "python$version" >/dev/null 2>&1 || fail "$(codename) has no Python $version for $image"
  command -v mmdebstrap >/dev/null || install mmdebstrap
  # The machine's certificates come along: its network may go through an authority of its own.
  cat >"$hook" <<END
#!/bin/sh -e
ln -s python$version "\$1/usr/bin/python"
rm -rf "\$1"/usr/share/doc "\$1"/usr/share/man "\$1"/usr/share/locale "\$1"/var/cache/apt
cp "$bundle" "\$1$bundle"
printf '[global]\ncert = $bundle\n' >"\$1/etc/pip.conf"
END
  chmod +x "$hook"
  mmdebstrap --quiet --mode=root --variant=minbase --customize-hook="$hook" \
    --include="ca-certificates,netbase,tzdata,python3,python3-venv" \
    "$(codename)" - "$(mirror)" 2>"$state/mmdebstrap.log" |
    docker import -c 'ENV LANG=C.UTF-8' -c 'CMD ["python3"]' - "$image" >/dev/null ||
    { tail -5 "$state/mmdebstrap.log" >&2; fail "could not make $image"; }
}

base() { # name
  docker image inspect "$1" >/dev/null 2>&1 && return
  if timeout 300 docker pull -q "$1" >/dev/null 2>&1; then
    note "pulled $1"
  else
    timed "made $1 from Debian's packages" debian_image "$1"
  fi
}

case "${1:-}" in
  start) start ;;
  base) base "${2:?name of the image}" ;;
  stop) stop ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
