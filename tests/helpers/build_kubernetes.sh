#!/usr/bin/env bash
# kube-apiserver, kube-controller-manager and kubectl for tests, from Debian's source package kubernetes (1.20.2), as root:
#   build_kubernetes.sh [FOLDER]     FOLDER/bin has them then; ~/.cache/partway-kubernetes unless said
# Once: 4 minutes on two idle cores, 6 GB on the way. Where they are there, nothing is done.
set -euo pipefail
folder=$(realpath -m "${1:-${PARTWAY_KUBERNETES:-$HOME/.cache/partway-kubernetes}}")
programs="kube-apiserver kube-controller-manager kubectl"
for name in $programs; do [ -x "$folder/bin/$name" ] || lacking=1; done
[ -n "${lacking:-}" ] || exit 0
mkdir -p "$folder/bin"
cd "$folder"

# Sources of packages are fetched from where packages are.
for list in /etc/apt/sources.list.d/*.sources; do
  [ ! -e "$list" ] || sed -i '/^Types:/{/deb-src/!s/$/ deb-src/}' "$list"
done
if [ -s /etc/apt/sources.list ]; then sed -n 's/^deb /deb-src /p' /etc/apt/sources.list > /etc/apt/sources.list.d/partway.list; fi
apt-get update -qq
apt-get install -qq -y --no-install-recommends dpkg-dev etcd-server golang-go golang-github-modern-go-reflect2-dev
[ -d source ] || { apt-get source -qq --download-only kubernetes; dpkg-source -x kubernetes_*.dsc source; }

export GOPATH=$folder/go GOCACHE=$folder/cache GOPROXY=off GO111MODULE=off CGO_ENABLED=0
root=k8s.io/kubernetes
[ -d "$GOPATH/src/$root" ] || { mkdir -p "$GOPATH/src/k8s.io"; cp -r source "$GOPATH/src/$root"; }
cd "$GOPATH/src/$root"
# The reflect2 in the package does not link with this Go, and Debian's own package of it does.
rm -rf vendor/github.com/modern-go/reflect2
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/
# What is generated for OpenAPI is not in the package.
go build -o "$folder/bin/openapi-gen" $root/vendor/k8s.io/kube-openapi/cmd/openapi-gen
inputs=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd staging/src/k8s.io \
  | grep -vE '_test\.go|/test/|testdata|sample-apiserver|code-generator' | xargs -n1 dirname | sort -u \
  | sed -e "s#^staging/src/#$root/vendor/#" -e "/^\(pkg\|cmd\)/s#^#$root/#" | paste -sd,)
"$folder/bin/openapi-gen" -h hack/boilerplate/boilerplate.generatego.txt -O zz_generated.openapi -o "$GOPATH/src" \
  -p $root/pkg/generated/openapi -r "$folder/violations" -i "$inputs"
flags="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  version=$root/vendor/$package
  flags+=" -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20"
done
for name in $programs; do go build -ldflags "$flags" -o "$folder/bin/$name" "$root/cmd/$name"; done
