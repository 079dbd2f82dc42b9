// A project of a team with kinds of its own, which generates their methods and types as docs/typescript.md says.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdir, mkdtemp, readFile, symlink, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const [major, minor] = process.versions.node.split('.').map(Number);

/** Whether this Node runs the generator. */
export const generates = major > 20 || (major === 20 && minor >= 19);

/** Generates the methods and types, and compiles a file of this folder. Returns a function that runs Node there, with its directory. */
export async function ownProject(dev, file) {
  const root = fileURLToPath(new URL('..', import.meta.url));
  const project = await mkdtemp(join(dev.dir, 'own-'));
  await mkdir(join(project, 'node_modules', '@tidings'), { recursive: true });
  await symlink(root, join(project, 'node_modules', '@tidings', 'client'));
  await symlink(join(root, 'node_modules', '@nats-io'), join(project, 'node_modules', '@nats-io'));
  await writeFile(join(project, 'package.json'), '{"type":"module"}');
  await writeFile(join(project, file), await readFile(new URL(file, import.meta.url)));
  const page = await readFile(new URL('../../../docs/typescript.md', import.meta.url), 'utf8');
  const [, version, args] = /^npx @hey-api\/openapi-ts@(\S+) (.*)$/m.exec(page);
  const { devDependencies } = JSON.parse(await readFile(join(root, 'package.json'), 'utf8'));
  assert.equal(version, devDependencies['@hey-api/openapi-ts']);
  const node = async (...args) => (await promisify(execFile)(process.execPath, args, { cwd: project }).catch((e) =>
    assert.fail(`${e.message}\n${e.stdout}`))).stdout;
  const bin = (name) => join(root, 'node_modules', name);
  await node(bin('@hey-api/openapi-ts/bin/run.js'), ...args.replace('https://tidings.example.com', dev.api).split(' '));
  await node(bin('typescript/bin/tsc'), '--module', 'nodenext', '--target', 'es2022', '--strict', '--skipLibCheck', file);
  return Object.assign(node, { project });
}
