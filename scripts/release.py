"""Checks a release and writes its files into build/release: `.venv/bin/python scripts/release.py` (make release).

It takes the last commit, and nothing that is not committed. The wheel and the sdist are built twice, in two places, and
must be the same bytes. The wheel is installed into an environment of its own, where a server of it must answer. Images
must have the labels of this version. Then come the bill of materials and the list of digests. Nothing is uploaded: the
last lines say what is left to do.
"""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

import setup_environment as setup

TARGET = setup.ROOT / "build" / "release"
# Another version of what builds would write other files.
BUILT_WITH = "setuptools==80.9.0\n"
ANSWER_S = 60.0
# What docker/Dockerfile says of every image; `make image` adds the version and the commit.
LABELS = ("title", "description", "licenses")
BILL = setup.ROOT / "build" / "sbom.cdx.json"


def main():
    version, commit = version_of_project(), git("rev-parse", "HEAD")
    refuse_unless_ready(version)
    check_labels(version, commit)
    bill = bill_of_materials(version)
    epoch = git("log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as directory:
        builds = [build(Path(directory, name), epoch) for name in ("one", "another-place")]
        compare(*builds)
        shutil.rmtree(TARGET, ignore_errors=True)
        TARGET.mkdir(parents=True)
        for path in builds[0]:
            shutil.copy2(path, TARGET)
        wheel = next(TARGET.glob("*.whl"))
        check_installed(wheel, Path(directory, "environment"), version)
    (TARGET / f"lmi-server-{version}.cdx.json").write_text(bill, encoding="utf-8")
    digests = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(TARGET.iterdir())]
    (TARGET / "SHA256SUMS").write_text("".join(digests), encoding="utf-8")
    setup.say(f"{TARGET.relative_to(setup.ROOT)} has lmi-server {version} of commit {commit}:")
    print("".join(digests), end="")
    setup.say(f"not done: git tag v{version}; {setup.UV} publish {TARGET}/*.whl {TARGET}/*.tar.gz")


def version_of_project():
    return re.search(r"^version = (\S+)$", setup.SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)[1]


def refuse_unless_ready(version):
    changes = (setup.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        sys.exit(f'CHANGELOG.md has no "## [{version}] - YYYY-MM-DD"; write what this version changes below that line')
    if git("status", "--porcelain"):
        sys.exit("there are changes that are not committed; commit them, because only what is committed is released")
    if git("tag", "--list", f"v{version}"):
        sys.exit(f"v{version} is tagged already; raise the version in setup.cfg")


def check_labels(version, commit):
    """Images say what they are, of which version and of which commit. None is built."""
    labels = (setup.ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    labels += setup.run(["make", "--dry-run", "image"], cwd=setup.ROOT, capture_output=True, text=True).stdout
    wanted = [*(f'{name}="' for name in LABELS), f"version={version} ", f"revision={commit} "]
    missing = [label for label in wanted if f"org.opencontainers.image.{label}" not in labels]
    if missing:
        sys.exit(f"docker/Dockerfile and `make image` do not label images with {', '.join(missing)}")


def bill_of_materials(version):
    """Return what `make sbom` wrote, without the place of this checkout. It must be of this version."""
    bill = json.loads(BILL.read_text(encoding="utf-8"))
    of_project = [each for each in bill["components"] if each["name"] == "lmi-server"]
    found = [each["version"] for each in of_project]
    if found != [version]:
        sys.exit(
            f"{BILL} has lmi-server {', '.join(found) or 'not'}, not {version}; run make setup and make sbom again"
        )
    for each in of_project:
        references = each.pop("externalReferences", [])
        each["externalReferences"] = [more for more in references if not more["url"].startswith("file:")]
    return json.dumps(bill, indent=2) + "\n"


def git(*arguments):
    done = setup.run(["git", *arguments], cwd=setup.ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def build(directory, epoch):
    """Build the last commit in `directory`; return its sdist, and the wheel that is built from that."""
    source, out = directory / "source", directory / "out"
    source.mkdir(parents=True)
    archived = setup.run(["git", "archive", "HEAD"], cwd=setup.ROOT, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
        archive.extractall(source, filter="data")
    constraints = directory / "build-constraints.txt"
    constraints.write_text(BUILT_WITH, encoding="utf-8")
    environment = {**setup.uv_environment(setup.PIP_TO_UV), "SOURCE_DATE_EPOCH": epoch}
    arguments = ["build", "--quiet", "--build-constraints", str(constraints), "--out-dir", str(out)]
    setup.run([str(setup.UV), *arguments, str(source)], env=environment)
    sdist = next(out.glob("*.tar.gz"))
    write_reproducibly(sdist, int(epoch))
    return sdist, next(out.glob("*.whl"))


def write_reproducibly(sdist, epoch):
    """Write an sdist anew: its members by name, all of one time and of nobody. setuptools writes when it ran."""
    plain = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


def compare(first, second):
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            sys.exit(f"{one.name} has other bytes if it is built again: its build writes a time, a place or an order")


def check_installed(wheel, directory, version):
    """Install the wheel with nothing but what it demands, and ask a server of it with the echo handler."""
    environment = setup.uv_environment(setup.PIP_TO_UV)
    setup.run([str(setup.UV), "venv", "--quiet", "--python", str(setup.PYTHON), str(directory)])
    where = ("--quiet", "--python", str(directory / "bin" / "python"))
    setup.uv(environment, "install", *where, str(wheel))
    command = directory / "bin" / "lmi-server"
    said = setup.run([str(command), "--version"], capture_output=True, text=True).stdout
    if version not in said:
        sys.exit(f"lmi-server --version of the wheel says {said.strip()}, not {version}")
    model = directory / "model"
    model.mkdir()
    (model / "serving.properties").write_text("option.entryPoint=djl_python.echo\n", encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    serve = [str(command), "serve", str(model), "--port", "0"]
    with (directory / "log").open("w+") as log:
        server = subprocess.Popen(serve, env=clean, cwd=directory, stdout=log, stderr=subprocess.STDOUT)
        try:
            answer = ask(server, directory / "log")
        finally:
            server.terminate()
            try:
                server.wait(ANSWER_S)
            finally:
                server.kill()  # nothing, if it has ended
    if "fox" not in json.dumps(answer):
        sys.exit(f"the server of the wheel answers {answer} to a prompt about a fox")
    setup.say("the wheel serves, with nothing but what it demands")


def ask(server, log):
    """Return the answer to one request, once the log says where the server listens and that it is ready."""
    ends_at = time.monotonic() + ANSWER_S
    while time.monotonic() < ends_at and server.poll() is None:
        text = log.read_text(encoding="utf-8")
        address = re.search(r"http://127\.0\.0\.1:\d+", text)
        if address and "ready: process" in text:
            body = json.dumps({"inputs": "a quick fox", "parameters": {"max_new_tokens": 3}}).encode()
            call = urllib.request.Request(f"{address[0]}/invocations", body, {"content-type": "application/json"})
            with urllib.request.urlopen(call, timeout=ANSWER_S) as answer:
                return json.load(answer)
        time.sleep(0.2)
    sys.exit(f"the server of the wheel was not ready within {ANSWER_S:g} seconds:\n{log.read_text(encoding='utf-8')}")


if __name__ == "__main__":
    main()
