// The extension without VS Code: fakes of the two modules that it requires record what it asks of them.
"use strict";

const assert = require("node:assert");
const fs = require("node:fs");
const Module = require("node:module");
const path = require("node:path");
const { beforeEach, test } = require("node:test");

const ROOT = path.join(__dirname, "..");
const manifest = JSON.parse(fs.readFileSync(path.join(ROOT, "package.json"), "utf8"));

let calls;
let command;
let failure;
let configurationChanged;
const registered = {};

class FakeLanguageClient {
  constructor(id, name, server, options) {
    // The real one hands its transport to the program as an argument.
    calls.push(["new", server.command, ...server.args, ...(server.transport === undefined ? [] : ["--transport"])]);
    calls.selector = options.documentSelector;
  }

  async start() {
    calls.push(["start"]);
    if (failure) throw failure;
  }

  async stop() {
    calls.push(["stop"]);
  }
}

const fakes = {
  vscode: {
    commands: { registerCommand: (name, run) => void (registered[name] = run) },
    window: { showErrorMessage: async (text) => calls.push(["error", text]) },
    workspace: {
      getConfiguration: (section) => ({ get: (key) => (section === "lmi-server" && key === "command" ? command : undefined) }),
      onDidChangeConfiguration: (listener) => void (configurationChanged = listener),
    },
  },
  "vscode-languageclient/node": { LanguageClient: FakeLanguageClient },
};

const load = Module._load;
Module._load = (request, ...rest) => fakes[request] ?? load(request, ...rest);
const extension = require(path.join(ROOT, manifest.main));

beforeEach(async () => {
  calls = [];
  failure = undefined;
  command = manifest.contributes.configuration.properties["lmi-server.command"].default;
  await extension.deactivate();
  calls = [];
});

const activate = () => extension.activate({ subscriptions: [] });

test("it starts the server for serving.properties and YAML", async () => {
  await activate();
  assert.deepStrictEqual([...calls], [["new", "lmi-server", "lsp"], ["start"]]);
  assert.ok(calls.selector.some((each) => each.pattern === "**/serving.properties"));
  assert.ok(calls.selector.some((each) => each.language === "yaml"));
});

test("a server that cannot be started is an error with a remedy", async () => {
  failure = new Error("ENOENT");
  await activate();
  const [kind, text] = calls.at(-1);
  assert.strictEqual(kind, "error");
  assert.match(text, /lmi-server cannot be started \(ENOENT\); install it with: pip install/);
  calls = [];
  await extension.deactivate();
  assert.deepStrictEqual([...calls], []);
});

test("another command restarts it", async () => {
  await activate();
  calls = [];
  command = ["/opt/venv/bin/lmi-server", "lsp"];
  await configurationChanged({ affectsConfiguration: (name) => name === "lmi-server.command" });
  assert.deepStrictEqual([...calls], [["stop"], ["new", "/opt/venv/bin/lmi-server", "lsp"], ["start"]]);
  calls = [];
  await configurationChanged({ affectsConfiguration: () => false });
  assert.deepStrictEqual([...calls], []);
});

test("two changes at once leave one server", async () => {
  await activate();
  calls = [];
  const change = () => configurationChanged({ affectsConfiguration: () => true });
  await Promise.all([change(), change()]);
  const kinds = calls.map(([kind]) => kind);
  assert.deepStrictEqual(kinds, ["stop", "new", "start", "stop", "new", "start"]);
});

test("a message that stays open holds nothing up", async () => {
  const show = fakes.vscode.window.showErrorMessage;
  fakes.vscode.window.showErrorMessage = () => new Promise(() => {});
  failure = new Error("ENOENT");
  try {
    await Promise.race([activate(), new Promise((_, reject) => setImmediate(() => reject(new Error("it waits"))))]);
  } finally {
    fakes.vscode.window.showErrorMessage = show;
  }
});

test("the manifest names what there is", async () => {
  await activate();
  for (const each of manifest.contributes.commands) {
    assert.ok(registered[each.command], each.command);
  }
  assert.ok(fs.existsSync(path.join(ROOT, manifest.main)));
});

test("a workspace can neither choose the program nor start it before it is trusted", () => {
  assert.strictEqual(manifest.contributes.configuration.properties["lmi-server.command"].scope, "machine");
  assert.strictEqual(manifest.capabilities.untrustedWorkspaces.supported, false);
});
