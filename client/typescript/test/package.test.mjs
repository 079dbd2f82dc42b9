// Tests the package as npm packs it, in fresh projects.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdir, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test as nodeTest } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const test = (name, fn) => nodeTest(name, { timeout: 300_000 }, fn);
const root = fileURLToPath(new URL('..', import.meta.url));
const run = async (cwd, ...command) => {
  const failed = (error) => assert.fail(`${command.join(' ')}: ${error.message}\n${error.stdout}`);
  return (await promisify(execFile)(command[0], command.slice(1), { cwd }).catch(failed)).stdout;
};

let dir, packed, server;
before(async () => {
  dir = await mkdtemp(join(tmpdir(), 'tidings-package-'));
  [packed] = JSON.parse(await run(root, 'npm', 'pack', '--json', '--ignore-scripts', '--pack-destination', dir));
  server = createServer((_, response) => {
    response.writeHead(404, { 'Content-Type': 'application/problem+json' });
    response.end(JSON.stringify({ type: 'about:blank', status: 404, title: 'Not Found', code: 'not-found' }));
  }).listen(0, '127.0.0.1');
});
after(async () => {
  server?.close();
  await rm(dir, { recursive: true });
});

test('the tarball has the code, its types and the licenses, and no more', async () => {
  const files = packed.files.map((f) => f.path);
  const others = files.filter((f) => !/^dist\/(esm|cjs)\/.*\.(js|d\.ts)$/.test(f)).sort();
  assert.deepEqual(others, 
    ['LICENSE', 'LICENSE-hey-api.md', 'README.md', 'dist/cjs/package.json', 'openapi-ts.config.mjs', 'package.json']);
  for (const name of ['index', 'subscribe/index', 'tidings']) {
    for (const kind of ['esm', 'cjs']) for (const end of ['js', 'd.ts']) assert.ok(files.includes(`dist/${kind}/${name}.${end}`));
  }
  assert.equal(await readFile(join(root, 'LICENSE'), 'utf8'), await readFile(join(root, '../../LICENSE'), 'utf8'));
  const { exports, engines, repository } = JSON.parse(await readFile(join(root, 'package.json'), 'utf8'));
  assert.deepEqual([Object.keys(exports), engines.node, repository.type], [['.', './subscribe', './package.json'], '>=18.17', 'git']);
});

test('the readme links only to files of the package', async () => {
  const readme = await readFile(join(root, 'README.md'), 'utf8');
  const links = [...readme.matchAll(/\]\(([^)]+)\)/g)].map((m) => m[1]);
  assert.deepEqual(links.filter((link) => !packed.files.some((f) => f.path === link)), []);
});

const http = `import { isProblem, Tidings, type Comment } from '@tidings/client';
export async function main(url: string): Promise<string> {
  try {
    const comment: Comment = await new Tidings({ url, token: 't' }).getComment({ path: { comment_id: '1' } });
    return comment.comment_id;
  } catch (error) {
    return isProblem(error, 'not-found') ? error.code : String(error);
  }
}
main(process.argv[2]!).then(console.log);
`;
const subscriber = `import { handle, PermanentError, type Event, type FollowCreatedEvent } from '@tidings/client/subscribe';
import { connect } from '@nats-io/transport-node';
export async function main(): Promise<void> {
  const nc = await connect({ servers: '127.0.0.1' });
  await handle(nc, 'mailer', 'follow.created', (e: Event<FollowCreatedEvent>) => console.log(e.data.follower_id));
  await handle(nc, 'mailer', 'follow.*', (e) => void e.data.followee_id);
  await handle<{ song_id: string }>(nc, 'mailer', 'play.created', (e) => void e.data.song_id, { declared: ['play.created'] });
  // @ts-expect-error: there are no such events
  await handle(nc, 'mailer', 'follow.made', () => {});
}
console.log(typeof main, typeof handle, new PermanentError('no').permanent);
`;
const projects = {
  'ES modules': ['module', { module: 'node16', moduleResolution: 'node16' }],
  'CommonJS': ['commonjs', { module: 'commonjs', moduleResolution: 'node10', ignoreDeprecations: '6.0' }],
  'CommonJS with node16': ['commonjs', { module: 'node16', moduleResolution: 'node16' }],
};

for (const [name, [type, options]] of Object.entries(projects)) {
  test(`a fresh project of ${name} compiles and runs`, async () => {
    const project = join(dir, name.replaceAll(' ', '-'));
    await mkdir(project);
    const write = (file, text) => writeFile(join(project, file), text);
    await write('package.json', JSON.stringify({ name: 'fresh', private: true, type }));
    const compilerOptions = {
      ...options, target: 'es2022', lib: ['es2022', 'dom', 'dom.iterable', 'esnext.disposable'], strict: true, outDir: 'out', esModuleInterop: true,
      types: ['node'], skipLibCheck: true, // as `nest new` and `tsc --init` do
    };
    const build = async (file) => {
      await write('tsconfig.json', JSON.stringify({ compilerOptions, files: [file] }));
      await run(project, process.execPath, join(root, 'node_modules/typescript/bin/tsc'), '-p', '.');
    };
    const install = (...packages) => run(project, 'npm', 'install', '--silent', '--no-audit', '--no-fund', '--prefer-offline', ...packages);

    await write('http.ts', http);
    await install(join(dir, packed.filename), '@types/node@20');
    await build('http.ts'); // without NATS
    const { port } = server.address();
    assert.equal(await run(project, process.execPath, 'out/http.js', `http://127.0.0.1:${port}`), 'not-found\n');

    await write('subscriber.ts', subscriber);
    const { devDependencies } = JSON.parse(await readFile(join(root, 'package.json'), 'utf8'));
    await install(...['jetstream', 'transport-node'].map((p) => `@nats-io/${p}@${devDependencies[`@nats-io/${p}`]}`));
    await build('subscriber.ts');
    assert.equal(await run(project, process.execPath, 'out/subscriber.js'), 'function function true\n');
  });
}
