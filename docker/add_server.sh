#!/bin/sh
# Installs the server's wheel into the environment of an image, beside its packages. docker/Dockerfile runs it.
set -eu
python -m pip install --quiet --no-cache-dir --no-compile --no-index --no-deps /opt/lmi-server/wheels/*.whl
cd /opt/lmi-server/.venv/lib/python3*/site-packages
python -m compileall -q frontend handlers lmi_server
# The group may write there: `docker run --user` gives any user id the group 0.
chown -R lmi-server:0 /var/cache/lmi-server
chmod -R g=u /var/cache/lmi-server
