// Generates src/generated from the OpenAPI document of `tidings dev`: methods, types, codes of problems, and the document's digest.
// Generates the types of events from the JSON Schemas of event/contracts/builtin.
import { createClient } from '@hey-api/openapi-ts';
import { createHash } from 'node:crypto';
import { mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { output, plugins } from '../openapi-ts.config.mjs';
import { startDev } from './dev.mjs';

const schemas = new URL('../../../event/contracts/builtin/schemas/', import.meta.url);

export async function generate(document, folder) {
  await run(document, folder, plugins);
  const codes = Object.values(JSON.parse(document).components.examples).map((example) => example.value.code).sort();
  const list = codes.map((code) => `  '${code}',\n`).join('');
  const text = `/** Every \`code\` that the API's problems have. */\nexport const codes = [\n${list}] as const;\n`;
  await writeFile(join(folder, 'codes.ts'), text);
  await writeFile(join(folder, 'openapi.sha256'), createHash('sha256').update(document).digest('hex') + '\n');
  await generateEvents(folder);
}

async function run(document, folder, plugins) {
  const dir = await mkdtemp(join(tmpdir(), 'tidings-openapi-'));
  try {
    const input = join(dir, 'openapi.json');
    await writeFile(input, document);
    await createClient({ input, logs: { level: 'silent', file: false }, output: { path: folder, ...output }, plugins });
  } finally {
    await rm(dir, { recursive: true });
  }
}

// The newest version of each type of events, and the members that its payloads always have.
async function generateEvents(folder) {
  const all = new Map();
  for (const file of (await readdir(schemas)).sort()) {
    const schema = JSON.parse(await readFile(new URL(file, schemas), 'utf8'));
    const [, kind, event, version] = /^tidings\.(\w+)\.(\w+)\.v(\d+)$/.exec(schema.title);
    const type = `${kind}.${event}`;
    if (Number(version) < (all.get(type)?.version ?? 0)) continue;
    const name = `${kind}_${event}_event`.replace(/(^|_)(.)/g, (_, __, c) => c.toUpperCase());
    all.set(type, { version: Number(version), name, schema });
  }
  const components = Object.fromEntries([...all.values()].map(({ name, schema: { $id, $schema, title, ...rest } }) => [name, rest]));
  await run(JSON.stringify({ openapi: '3.1.0', info: { title: 'Events', version: '1' }, paths: {}, components: { schemas: components } }),
    join(folder, 'events'), ['@hey-api/typescript']);
  const typeOf = ({ type }) => (type === 'integer' ? 'number' : type);
  const members = ({ properties, required }) => required.map((m) => `${m}: '${typeOf(properties[m])}'`).join(', ');
  const rows = (row) => [...all].map(([type, of]) => `  '${type}': ${row(of)}\n`).join('');
  await writeFile(join(folder, 'events.ts'), `import type * as events from './events/types.gen.js';

/** The payloads of the events of the built-in kinds, by type. */
export interface Events {
${rows(({ name }) => `events.${name};`)}}

/** The version of each payload, and the types of the members that it always has. */
export const required = {
${rows(({ version, schema }) => `{ version: ${version}, members: { ${members(schema)} } },`)}} as const;
`);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const dev = await startDev();
  try {
    const document = await (await fetch(`${dev.api}/v1/openapi.json`)).text();
    await generate(document, fileURLToPath(new URL('../src/generated', import.meta.url)));
  } finally {
    await dev.stop();
  }
}
