#!/bin/bash
# Fetches Debian's source of Kubernetes and builds its servers, once: build.sh FOLDER
# Debian ships kubectl and etcd as programs, but of Kubernetes' servers only the source, and that of
# bookworm (1.20.2) is the newest with servers in it: later ones (trixie 1.32, sid 1.36) are cut down to
# kubectl, Ubuntu has none, and no known package of PyPI or npm brings kube-apiserver, k3s or envtest's programs.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
programs=(kube-apiserver kube-controller-manager kube-scheduler)
built() { for each in "${programs[@]}"; do [ -x "$folder/$each" ] || return 1; done; }
found() { for each; do command -v "$each" >/dev/null || return 1; done; }
built && found etcd kubectl && exit 0

packages=()  # what is there already stays, whoever installed it
found etcd || packages+=(etcd-server)
found kubectl || packages+=(kubernetes-client)
found go || packages+=(golang-go)
found dpkg-source || packages+=(dpkg-dev)
found rsync || packages+=(rsync)  # its makefile copies what it has built with it
if [ ${#packages[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || { echo "not installed: ${packages[*]}" >&2; exit 1; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null
fi
built && exit 0

cd "$folder"
if ! ls -d kubernetes-*/cmd >/dev/null 2>&1; then
  # A list of sources of our own, at the machine's archive: its own list stays as it is.
  mkdir -p apt/lists/partial
  archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -1)
  echo "deb-src $archive ${SUITE:-bookworm} main" > apt/sources.list
  options=(-o Dir::Etc::SourceList="$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$folder/apt/lists" -o APT::Sandbox::User=root)
  apt-get -qq "${options[@]}" update
  apt-get -qq "${options[@]}" source kubernetes >/dev/null
fi
cd kubernetes-*/
if [ ! -d cmd/kube-apiserver ]; then
  echo "the source of Kubernetes in ${SUITE:-bookworm} is without its servers: SUITE=bookworm has them" >&2
  exit 1
fi
version=$(sed -n 's/.*really\([0-9.]*\).*/\1/p' debian/changelog | head -1)
# Its own makefile: some of the source is generated first, by programs that it builds itself.
mkdir -p .go/src/k8s.io home
[ -L .go/src/k8s.io/kubernetes ] || ln -s ../../.. .go/src/k8s.io/kubernetes
cat > version.sh <<END
KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=archive KUBE_GIT_VERSION=v$version
KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=$(echo "$version" | cut -d. -f2)
END
for program in "${programs[@]}"; do
  [ -x "$folder/$program" ] && continue
  echo "building $program $version" >&2
  env HOME="$PWD/home" GOPATH="$PWD/.go" GOFLAGS="-p=${GOMAXPROCS:-$(nproc)}" CGO_ENABLED=0 \
    KUBE_GIT_VERSION_FILE="$PWD/version.sh" make --quiet WHAT="cmd/$program" >&2
  install _output/bin/"$program" "$folder/$program"
done
