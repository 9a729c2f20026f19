#!/usr/bin/env bash
# prepare.sh DIR [MIRROR] : brings an emulator, Debian's Python for arm64 and the wheels of the huggingface extra into
# DIR, and writes DIR/python, which runs them. It takes Debian's and Python's package indexes, 2 GB and no rights of root.
# MIRROR is a mirror of Debian; without it, the first one of this machine's apt.
#
# The emulator runs one program, which starts no other of its kind but by DIR/python (EMULATED_PYTHON). No server runs.
set -euo pipefail
directory=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
uv=${UV:-$root/.venv/bin/uv}
mirror=${2:-$(apt-get indextargets --format '$(SITE)' | sed -n 1p)}
[ -n "$mirror" ] || { echo "apt names no mirror of Debian; run: prepare.sh DIR MIRROR" >&2; exit 1; }
cd "$directory"

apt-get download qemu-user-static debootstrap
for package in qemu-user-static_*.deb debootstrap_*.deb; do dpkg -x "$package" tools; done
if [ ! -x debian/usr/bin/python3.11 ]; then
  DEBOOTSTRAP_DIR=$directory/tools/usr/share/debootstrap tools/usr/sbin/debootstrap --foreign --arch=arm64 \
    --variant=minbase --include=python3,libgomp1,libstdc++6 bookworm debian "$mirror"
  for package in debian/var/cache/apt/archives/*.deb; do dpkg -x "$package" debian; done
fi

# Structured output is left out: wheels of llguidance are for glibc 2.31 and later. Later wheels of torch for this processor
# need CUDA's libraries; 2.9 does not.
arguments=(--python-platform aarch64-manylinux_2_28 --python-version 3.11 --only-binary :all:)
cat > wanted.txt <<'W'
accelerate
httptools
jinja2
msgspec
numba
numpy
peft
pillow
prometheus-client
psutil
pydantic
rich
starlette
torch
transformers
typer
uvicorn
uvloop
W
echo "torch==2.9.1" > torch.txt
grep -v '^torch==' "$root/constraints.txt" > constraints.txt  # uv holds an override to the constraints, too
"$uv" pip compile --quiet "${arguments[@]}" --constraint constraints.txt --override torch.txt wanted.txt --output-file all.txt
grep -E '^[A-Za-z0-9._-]+==' all.txt | grep -v -i -E '^(nvidia|cuda|triton)' | sed 's/ *;.*//' > chosen.txt
"$uv" pip install --quiet "${arguments[@]}" --target site --no-deps --requirement chosen.txt

cat > python <<P
#!/usr/bin/env bash
export PYTHONPATH=$(printf %q "$directory/site:$root") NUMBA_CACHE_DIR=$(printf %q "$directory/kernels")
export EMULATED_PYTHON=$(printf %q "$directory/python")
directory=$(printf %q "$directory")
exec "\$directory/tools/usr/bin/qemu-aarch64-static" -cpu max -L "\$directory/debian" "\$directory/debian/usr/bin/python3.11" "\$@"
P
chmod +x python
echo "run: $(printf %q "$directory")/python -u scripts/emulate_arm64/checks.py kernels blocks answers"
