// Starts `lmi-server lsp` for serving.properties and files in YAML, and restarts it when its command changes.
"use strict";

const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

const SECTION = "lmi-server";
const DOCUMENTS = [
  { scheme: "file", pattern: "**/serving.properties" },
  { scheme: "file", language: "yaml" },
];

let client;
let restarted = Promise.resolve();

async function activate(context) {
  context.subscriptions.push(
    vscode.commands.registerCommand("lmi-server.restart", restart),
    vscode.workspace.onDidChangeConfiguration((event) => event.affectsConfiguration(`${SECTION}.command`) && restart()),
  );
  await start();
}

async function start() {
  const [command, ...args] = vscode.workspace.getConfiguration(SECTION).get("command");
  const server = { command, args };  // a transport would add an argument to those that the user has set
  client = new LanguageClient(SECTION, "lmi-server", server, { documentSelector: DOCUMENTS });
  try {
    await client.start();
  } catch (error) {
    client = undefined;
    const remedy = "install it with: pip install 'lmi-server[lsp]', or set lmi-server.command";
    // Not awaited: it ends when the message is closed.
    vscode.window.showErrorMessage(`${command} cannot be started (${error.message}); ${remedy}`);
  }
}

/** Restarts one after the other: two at once would leave a server behind. */
function restart() {
  // Who asked for the last one has its error.
  restarted = restarted.catch(() => {}).then(deactivate).then(start);
  return restarted;
}

async function deactivate() {
  const stopping = client;
  client = undefined;
  if (stopping) {
    await stopping.stop();
  }
}

module.exports = { activate, deactivate };
