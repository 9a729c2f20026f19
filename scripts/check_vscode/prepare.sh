#!/bin/sh
# Installs VS Code (as code-server, for the browser) below $1, and the packaged extension in it. Needs npm with Node.js 20,
# and what node-gyp takes to compile. Packages whose scripts need other downloads than npm's are left as they are.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1" && cd "$1"
here=$(pwd)
server=$here/node_modules/code-server
if [ ! -e "$server/lib/vscode/node_modules.asar" ]; then
  npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$here" code-server@4.100.3
  # Compiled for passwords alone, which a server on the loopback interface needs none of.
  echo 'exports.hash = exports.verify = async () => false;' > node_modules/argon2/argon2.js
  cd "$server/lib/vscode"
  npm install --silent --no-audit --no-fund --ignore-scripts --omit=dev
  npm rebuild --silent @vscode/spdlog native-watchdog node-pty
  ln -sfn node_modules node_modules.asar
fi
rm -rf "$here/extension" "$here/extensions"
cp -r "$root/editors/vscode" "$here/extension"
cd "$here/extension"
npm ci --silent --no-audit --no-fund
npx --yes @vscode/vsce@3.2.1 package --skip-license --allow-missing-repository --out "$here/lmi-server.vsix" > /dev/null
node "$server/out/node/entry.js" --config /dev/null --user-data-dir "$here/data" --extensions-dir "$here/extensions" \
  --install-extension "$here/lmi-server.vsix"
