#!/bin/sh
# The job's own set-up command, as users write it: install what the image lacks.
set -eu
exec python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-cache-dir \
    --index-url "$INDEX_URL" --trusted-host "$INDEX_HOST" --target /opt/job-env --requirement /job/requirements.txt
