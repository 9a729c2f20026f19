#!/bin/sh
# base_image.sh TAG [SUITE]: makes localhost/TAG of Debian's packages, for machines that reach no registry of images:
#
#     docker/base_image.sh python:3.14-slim-forky forky
#     BUILDAH_FORMAT=docker make test-image DOCKER=podman BASE_IMAGE=localhost/python:3.14-slim-forky
#
# It takes root, debootstrap and buildah, whose storage podman shares.
set -eu
tag=$1 suite=${2:-forky}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mirror=$(apt-get indextargets --format '$(SITE)' | sed -n 1p)
# debootstrap knows a suite by a script of that name. One that is newer than debootstrap is made as sid is.
scripts=/usr/share/debootstrap/scripts
[ -e "$scripts/$suite" ] && script=$scripts/$suite || script=$scripts/sid
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" "$mirror" "$script"
ln -sf python3 "$root/usr/bin/python"
box=$(buildah from scratch)
buildah copy --quiet "$box" "$root" / > /dev/null
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python3 "$box"
buildah commit --quiet --rm "$box" "localhost/$tag"
