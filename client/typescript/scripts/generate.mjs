// Generates src/generated from the OpenAPI document of `tidings dev`: methods, types, codes of problems, and the document's digest.
import { createClient } from '@hey-api/openapi-ts';
import { createHash } from 'node:crypto';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { startDev } from './dev.mjs';

export async function generate(document, folder) {
  const dir = await mkdtemp(join(tmpdir(), 'tidings-openapi-'));
  try {
    const input = join(dir, 'openapi.json');
    await writeFile(input, document);
    await createClient({
      input,
      logs: { level: 'silent', file: false },
      output: { path: folder, module: { extension: '.js' } },
      plugins: [
        '@hey-api/typescript',
        {
          name: '@hey-api/sdk',
          operations: { strategy: 'single', containerName: 'Operations', methods: 'instance' },
          responseStyle: 'data',
        },
        { name: '@hey-api/client-fetch', throwOnError: true },
      ],
    });
  } finally {
    await rm(dir, { recursive: true });
  }
  const codes = Object.values(JSON.parse(document).components.examples).map((example) => example.value.code).sort();
  const list = codes.map((code) => `  '${code}',\n`).join('');
  const text = `/** Every \`code\` that the API's problems have. */\nexport const codes = [\n${list}] as const;\n`;
  await writeFile(join(folder, 'codes.ts'), text);
  await writeFile(join(folder, 'openapi.sha256'), createHash('sha256').update(document).digest('hex') + '\n');
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
